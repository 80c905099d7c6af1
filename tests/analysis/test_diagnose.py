"""The diagnosis: gradients beside autodiff's, measures beside scipy's, and splits of known errors."""

import dataclasses
import functools
import json
import runpy
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from support.marks import parametrize

import eval as evaluation_program
import mxjax
import train as training_program
from analysis.diagnose import diagnose as program
from analysis.diagnose import measures, plots
from analysis.diagnose.capture import make_gradients, make_pass
from analysis.diagnose.diagnose import diagnose, diagnose_model, totals
from analysis.diagnose.plots import draw
from analysis.diagnose.split import Grams, split
from analysis.diagnose.wgrad import VARIANTS, gradient_grams, wgrad_grams
from analysis.restore import Restored
from models import decoder
from models.configs import DecoderConfig
from models.gemms import linear_weights
from mxjax.operands.use import OperandUse
from mxjax.policy import OPERANDS, Gemm, Rotation
from mxjax.products.implementations import compiler_options
from training.command_line import parse
from training.phases import Phase

MODEL = DecoderConfig(64, 64, 2, 2, 1, 32, 96, rope_theta=10_000.0)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.fixture(scope="module")
def passes():
    params = decoder.init(MODEL, jax.random.key(0))
    run = make_pass(MODEL, decoder.layer_policies(MODEL, mxjax.get_policy("bf16")), "xla")
    batches = jax.random.randint(jax.random.key(1), (3, 2, 33), 0, 64)
    return params, batches, [jax.device_get(run(params, b, jax.random.key(2))) for b in batches]


def test_gradients_are_autodiffs_and_the_products_of_the_captured_tensors(passes):
    params, batches, found = passes
    policies = decoder.layer_policies(MODEL, mxjax.get_policy("bf16"))
    gradient = jax.jit(
        jax.grad(lambda p: decoder.mean_loss(MODEL, p, batches[0], policies=policies)),
        compiler_options=compiler_options(policies.policies, "xla"),
    )
    expected = gradient(params)
    jax.tree.map(np.testing.assert_array_equal, dict(found[0].gradients), linear_weights(expected["blocks"]))
    for name, tensors in found[0].tensors.items():
        x, dy = (np.asarray(t, np.float64).reshape(2, -1, t.shape[-1]) for t in tensors)
        dw = np.einsum("lti,ltj->lij", x, dy)
        error = np.linalg.norm(dw - found[0].gradients[name]) / np.linalg.norm(dw)
        assert error < 1e-5, name


@parametrize("name", "bf16", slow=["wgrad_sr"])
def test_gradients_alone_are_those_of_a_pass(passes, name):
    params, batches, _ = passes
    policies = decoder.layer_policies(MODEL, mxjax.get_policy(name))
    alone, whole = (
        make(MODEL, policies, "xla")(params, batches[0], jax.random.key(2))
        for make in (make_gradients, make_pass)
    )
    assert set(alone.gradients) == set(whole.tensors)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
    jax.tree.map(close, alone.gradients, whole.gradients)
    mean_loss = jax.jit(functools.partial(decoder.mean_loss, MODEL, policies=policies))
    loss = mean_loss(params, batches[0], key=jax.random.key(2))
    np.testing.assert_allclose(alone.loss, loss, rtol=1e-3)


@pytest.mark.slow
def test_gradients_have_the_z_loss_of_the_run(passes, monkeypatch):
    params, batches, _ = passes
    policies = decoder.layer_policies(MODEL, mxjax.get_policy("bf16"))

    @functools.partial(jax.grad, argnums=0)
    def expected(blocks):
        logits = decoder.apply(MODEL, params | {"blocks": blocks}, batches[0, :, :-1], policies=policies)
        normalizer = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, batches[0, :, 1:, None], axis=-1)[..., 0]
        return jnp.mean(normalizer - chosen + 0.5 * normalizer**2)

    wanted = linear_weights(jax.jit(expected)(params["blocks"]))
    restored = Restored(parse(["--z-loss", "0.5"]), MODEL, params, 1, Phase(1, "bf16", policies), "xla")
    monkeypatch.setattr(program, "diagnose", lambda *_, say, **training: training)
    training = diagnose_model(restored, batches)
    del training["versions"], training["batches"], training["tokens"]
    for make in (make_gradients, make_pass):
        found = make(MODEL, policies, "xla", **training)(params, batches[0], jax.random.key(2)).gradients
        for name, gradient in wanted.items():
            error = np.linalg.norm(found[name] - gradient) / np.linalg.norm(gradient)
            assert error < 0.02, name  # activations are bfloat16


def test_the_shape_of_a_tensor_is_scipys():
    t = jnp.asarray(np.random.default_rng(0).standard_t(5, (64, 50)), jnp.float32)
    found = jax.jit(measures.shape_of, static_argnums=1)(t, 0)
    np.testing.assert_allclose(found.kurtosis, stats.kurtosis(t, axis=None, fisher=False), rtol=1e-4)
    x = np.asarray(t, np.float64)
    np.testing.assert_allclose(found.outliers, np.mean(np.abs(x) > 6 * np.sqrt(np.mean(x**2))), rtol=1e-6)
    blocks = x.T.reshape(-1, 32)
    crest = np.abs(blocks).max(1) / np.sqrt((blocks**2).mean(1))
    np.testing.assert_allclose(found.crest, crest.mean(), rtol=1e-5)


def test_a_rotation_makes_heavy_tails_normal():
    t = jnp.asarray(np.random.default_rng(0).laplace(size=(256, 64)), jnp.float32)
    found = jax.jit(lambda t: measures.measure_operand(t, OperandUse(0)))(t)
    assert found.before.kurtosis > 5
    assert 2.9 < found.after.kurtosis < 3.4


def test_histograms_count_blocks():
    t = jnp.concatenate([jnp.full((1, 32), 6.0), jnp.full((2, 32), 0.8), jnp.zeros((1, 32))])
    found = jax.jit(lambda t: measures.measure_operand(t, OperandUse(-1)))(t)
    scales = {i: int(n) for i, n in enumerate(found.scales) if n}
    assert scales == {127: 1, 127 - 3: 2, 0: 1}  # 6 = 1.5 * 2**2 * 2**0; 0.8 = 1.6 * 2**2 * 2**-3
    mantissas = {i: int(n) for i, n in enumerate(found.mantissas) if n}
    assert mantissas == {8: 1, 9: 2}  # 1.5 and 1.6 in sixteenths


def test_the_energy_of_the_mean_is_that_of_the_best_constant_row():
    t = normal(0, 40, 8) + 2.0
    rest = t - jnp.mean(t, 0, keepdims=True)
    np.testing.assert_allclose(measures.mean_energy(t), 1 - jnp.sum(rest**2) / jnp.sum(t**2), rtol=1e-5)


@pytest.mark.parametrize("name", ["H16 floor", "stochastic rceil"])
def test_weight_gradients_are_dots(name):
    x, w, dy, key = normal(0, 40, 48), normal(1, 48, 56), normal(2, 40, 56), jax.random.key(3)
    policy = dataclasses.replace(mxjax.get_policy("fp32"), wgrad=VARIANTS[name])

    @jax.jit
    def both(x, w, dy, key):
        _, vjp = jax.vjp(lambda w: mxjax.dot(x, w, policy=policy, key=key, implementation="reference"), w)
        return measures.weight_gradient(x, dy, VARIANTS[name], jax.random.fold_in(key, 2)), *vjp(dy)

    np.testing.assert_allclose(*both(x, w, dy, key), rtol=1e-5, atol=1e-5)


def test_inner_products_are_those_of_the_errors(passes):
    _, _, found = passes
    grams = wgrad_grams(found, jax.random.key(0), {"nearest": Gemm(), "H16": Gemm(rotation=Rotation(16))})
    tensors = [p.tensors["mlp.down"] for p in found]
    x = [np.asarray(t.x[1], np.float32).reshape(-1, 96) for t in tensors]
    dy = [np.asarray(t.dy[1], np.float32).reshape(-1, 64) for t in tensors]
    exact = np.stack([a.T @ b for a, b in zip(x, dy, strict=True)]).reshape(3, -1)
    nearest = [mxjax.dequantize(mxjax.quantize(jnp.asarray(a), axis=0)) for a in (*x, *dy)]
    computed = np.stack([np.asarray(nearest[i]).T @ np.asarray(nearest[3 + i]) for i in range(3)])
    e = computed.reshape(3, -1) - exact
    ours = grams["nearest"]["blocks.1.mlp.down"]
    for actual, wanted in zip(ours, (e @ e.T, e @ exact.T, exact @ exact.T), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-3, atol=1e-5 * np.abs(wanted).max())
    assert set(grams["H16"]) == set(grams["nearest"])


def test_inner_products_of_whole_gradients_are_those_of_float64():
    """Errors of a thousandth of gradients with 700,700 weights; from the device and from the host."""
    generator = np.random.default_rng(0)
    exact = [
        {
            "mlp.down": generator.normal(1, 3, (2, 700, 1001)).astype(np.float32),
            "out": np.ones((2, 3, 5), "f"),
        }
        for _ in range(3)
    ]
    noise = generator.normal(1, 1e-3, (3, 1, 700, 1)).astype(np.float32)
    found = [
        {"mlp.down": gradients["mlp.down"] * n, "out": gradients["out"]}
        for gradients, n in zip(exact, noise, strict=True)
    ]
    grams = gradient_grams(jax.device_put(found), exact)
    assert list(grams) == ["blocks.0.mlp.down", "blocks.1.mlp.down", "blocks.0.out", "blocks.1.out"]
    p, g = (np.stack([b["mlp.down"][1].ravel() for b in side]).astype(np.float64) for side in (found, exact))
    e = p - g
    ours = grams["blocks.1.mlp.down"]
    for actual, wanted in zip(ours, (e @ e.T, e @ g.T, g @ g.T), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-6 * np.abs(wanted).max())
    np.testing.assert_array_equal(grams["blocks.0.out"].ee, np.zeros((3, 3)))
    for actual, wanted in zip(split(ours), split(Grams(e @ e.T, e @ g.T, g @ g.T)), strict=True):
        np.testing.assert_allclose(actual[:3], wanted[:3], rtol=1e-4, atol=1e-6)


def test_a_known_error_is_split():
    """Errors of -2 % along the gradient, 0.1 across it, and noise of the gradient's norm."""
    generator, n, size = np.random.default_rng(0), 64, 4000
    g, across = (v / np.linalg.norm(v) for v in generator.normal(size=(2, size)))
    across -= (across @ g) * g
    gradients = g + generator.normal(0, 0.5 / np.sqrt(size), (n, size))
    errors = -0.02 * g + 0.1 * across + generator.normal(0, 1 / np.sqrt(size), (n, size))
    found = split(Grams(errors @ errors.T, errors @ gradients.T, gradients @ gradients.T))
    wanted = {
        "along": -0.02,
        "across": 0.1,
        "repeating_share": 0.0104 / 1.0104,
        "error": np.sqrt(1.0104 / 1.25),
    }
    for name, value in wanted.items():
        estimate = getattr(found, name)
        half = (estimate.high - estimate.low) / 2
        assert abs(estimate.mean - value) < 1.5 * half, name
        assert half < 0.05
    np.testing.assert_allclose(found.gradient_over_noise.mean * found.error.mean, 3**-0.5)


def test_an_exact_gradient_has_no_parts_of_its_error():
    g = np.random.default_rng(0).normal(size=(3, 10))
    found = split(Grams(np.zeros((3, 3)), np.zeros((3, 3)), g @ g.T))
    assert found.error.mean == 0
    assert np.isnan(found.repeating_share.mean)
    with pytest.raises(ValueError, match="at least 3 batches, got 2; raise --batches"):
        split(Grams(*(np.eye(2),) * 3))


def test_too_few_batches_are_an_error(passes):
    params, batches, _ = passes
    policies = decoder.layer_policies(MODEL, mxjax.get_policy("bf16"))
    with pytest.raises(ValueError, match="at least 3 batches of one shape, got 2 batches of 1 shape; change"):
        diagnose(MODEL, params, policies, "xla", list(np.asarray(batches[:2])))


def test_bad_input_leaves_no_folder_of_a_diagnosis(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(SystemExit, match="holds no run"):
        evaluation_program.main(["diagnose", str(tmp_path), "--out", str(out)])
    assert not out.exists()


def test_columns_of_wgrad_s_errors_go_by_depth_and_rows_by_error():
    layers = [f"blocks.{i}.{kind}" for kind in ("qkv", "down") for i in (0, 10, 2)]
    splits = {
        variant: {name: {"error": {"mean": error}} for name in ("all", *sorted(layers))}
        for variant, error in (("worse", 0.2), ("better", 0.1))
    }
    found = plots._split_grid(splits, layers, "error")
    assert found.columns == ["0 qkv", "0 down", "2 qkv", "2 down", "10 qkv", "10 down"]
    np.testing.assert_array_equal(found.values, np.repeat([[0.2], [0.1]], 6, axis=1))


def test_panels_without_values_are_left_out():
    pytest.importorskip("matplotlib")
    grid, zeros = (plots.Grid(["row"], ["0", "1"], np.full((1, 2), v), "block") for v in (1.0, 0.0))
    figure = plots._heat_maps({"error": grid, "clipped": zeros})
    assert [axes.get_title() for axes in figure.axes if axes.get_title()] == ["error"]
    assert plots._heat_maps({"clipped": zeros}) is None
    exact = {gemm: {name: {} for name in names} for gemm, names in OPERANDS.items()}
    assert plots.histograms({"layers": {"blocks.0.out": exact}}) is None


@pytest.mark.slow
def test_the_command_writes_tables_json_and_plots(tmp_path, capsys, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    flags = ["--policy", "fp8", "--batch-size", "2", "--seq-len", "32", "--eval-batches", "1", "--steps", "2"]
    training_program.train(parse([*flags, "--warmup-steps", "1", "--out", str(tmp_path / "run")]))
    out = tmp_path / "diagnosis"
    arguments = [str(tmp_path / "run"), "--policy", "wgrad_sr", "--batches", "3", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["eval.py", "diagnose", *arguments])
    few = {name: VARIANTS[name] for name in ("nearest even", "H16 floor")}
    monkeypatch.setattr(program, "diagnose", functools.partial(diagnose, variants=few))
    runpy.run_path(evaluation_program.__file__, run_name="__main__")
    captured = capsys.readouterr()
    printed = captured.out
    assert captured.err.endswith("measuring: Wgrad in 2 variants\n")
    found = json.loads((out / "diagnosis.json").read_text())
    monkeypatch.setattr(program, "diagnose", lambda *_, **__: found)  # so that all is measured once
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-2], "--json"])
    runpy.run_path(evaluation_program.__file__, run_name="__main__")
    assert json.loads(capsys.readouterr().out) == totals(found)
    assert len(found["layers"]) == 16
    assert set(found["wgrad"]) == set(few)
    assert (found["batches"], found["tokens"], found["step"]) == (3, 192, 2)
    wgrad = found["layers"]["blocks.3.mlp.down"]["wgrad"]
    assert 0.9 < wgrad["product"]["projection"] < 1.1
    np.testing.assert_allclose(sum(wgrad["dy"]["scales"]["share"]), 1, atol=1e-4)
    np.testing.assert_allclose(sum(wgrad["dy"]["mantissas"]), 1, atol=1e-4)
    assert found["gradient"]["all"]["error"]["mean"] > found["wgrad"]["nearest even"]["all"]["error"]["mean"]
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        draw(found, tmp_path / "again")
    titles = (tmp_path / "again" / "wgrad.svg").read_text()
    got = {path.name for path in out.iterdir()}
    assert got == {"diagnosis.json", "gemms.svg", "wgrad.svg", "histograms.svg"}
    assert f">{tmp_path / 'run'}, step 2, policy wgrad_sr<" in titles
    assert "blocks.3.mlp.down" in printed
