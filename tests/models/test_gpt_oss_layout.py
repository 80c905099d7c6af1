"""gpt-oss's own layout: what the Fprop multiplies, as transformers reads it, and the same bytes again."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.llamas import layer_policies, params_of, tensors

import mxjax
from models import decoder
from models.configs import ClampedSwiGLU, ExpertsConfig, get_config
from models.huggingface.quantized import choose_operands, names_of_others, quantized_weights
from training.huggingface.exporting import export_checkpoint
from training.huggingface.importing import import_checkpoint

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "architectures" / "gpt_oss"
OSS = get_config("gpt-oss-20b")
EXPERTS = ExpertsConfig(2, 1, biased=True, clamped=ClampedSwiGLU())
SMALL = dataclasses.replace(OSS, vocab_size=64, d_model=64, n_layers=2, n_heads=2, n_kv_heads=1, d_ff=32,
                            windows=(), experts=EXPERTS)  # fmt: skip


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The export of the golden checkpoint, whose experts transformers unpacked, and the imported run."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    import_checkpoint(GOLDEN, folder / "run")
    export_checkpoint(folder / "run", folder / "out", quantize="mxfp4")
    return folder / "out", folder / "run"


def test_it_has_the_tensors_of_openai_and_the_same_bytes_again(exported, tmp_path):
    out, run = exported
    ours, theirs = tensors(out), tensors(GOLDEN)
    assert {name: spec for name, (spec, _) in ours.items()} == {n: spec for n, (spec, _) in theirs.items()}
    assert json.loads((out / "config.json").read_text()) == json.loads((GOLDEN / "config.json").read_text())
    import_checkpoint(out, tmp_path / "again")
    jax.tree.map(np.testing.assert_array_equal, params_of(tmp_path / "again"), params_of(run))
    export_checkpoint(tmp_path / "again", tmp_path / "once more", quantize="mxfp4")
    assert tensors(tmp_path / "once more") == ours


@pytest.mark.parametrize("rhs", [{"block_shape": (32, 32)}, {"scale_rule": "even"}], ids=str)
def test_values_are_those_that_the_fprop_multiplies(rhs):
    """MXFP4 represents the identity, so its product with a weight is the weight as the Fprop reads it."""
    policy = mxjax.Policy(fprop=mxjax.Gemm(rhs=mxjax.Operand(**rhs)))
    params = jax.tree.map(np.asarray, decoder.init(SMALL, jax.random.key(0)))
    layers = layer_policies(SMALL, policy, [("blocks.0.*", "bf16")])
    operands, _ = choose_operands(SMALL, layers, None)
    found = dict(quantized_weights(SMALL, params, operands))
    names = [f"model.layers.1.mlp.experts.{name}_proj" for name in ("gate_up", "down")]
    assert list(found) == names
    assert names_of_others(SMALL, operands) == ["model.layers.0.mlp.experts"]
    for name, parameter in zip(names, ("gate_up", "down"), strict=True):
        w = jnp.asarray(params["blocks"]["mlp"][parameter][1])
        rows = jnp.tile(jnp.eye(w.shape[1]), (2, 1))
        multiply = jax.jit(functools.partial(mxjax.ragged_dot, policy=policy))
        read = multiply(rows, w, np.full(2, w.shape[1], np.int32))
        read = np.asarray(read).reshape(w.shape).swapaxes(1, 2)
        if parameter == "gate_up":  # the columns take turns
            read = read.reshape(2, 2, 32, 64).swapaxes(1, 2).reshape(2, 64, 64)
        np.testing.assert_array_equal(found[name].values(), read)


def test_what_it_cannot_hold_is_refused(exported, tmp_path):
    with pytest.raises(ValueError, match="gpt-oss's experts; leave it out"):
        export_checkpoint(exported[1], tmp_path / "out", quantize="quark")
    with pytest.raises(ValueError, match="packed weights only"):
        export_checkpoint(exported[1], tmp_path / "out", quantize="mxfp4", activations=True)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match=r"rounds blocks\.0\.mlp\.gate_up to MXFP4 and blocks\.0\.mlp\.down"):
        choose_operands(SMALL, layer_policies(SMALL, "fp8", [("*.gate_up", "weight_only")]), None)


def test_transformers_loads_it(exported):
    """The weights are exact, so the logits are those of the checkpoint that it saved."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    load = transformers.GptOssForCausalLM.from_pretrained
    model, report = load(exported[0], dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    with np.load(GOLDEN / "golden.npz") as golden, torch.no_grad():
        tokens, logits = torch.from_numpy(golden["tokens"]).long(), golden["logits"]
        np.testing.assert_allclose(model(tokens).logits.numpy(), logits, atol=2e-5)
