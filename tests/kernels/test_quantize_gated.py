"""SwiGLU within Hopper's quantizer kernel, beside XLA's SwiGLU and the definitions."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax import gated_product
from mxjax.devices import Target, use_target
from mxjax.gated import Gated, GatedGradient, swiglu
from mxjax.gated_product import fused_mlp
from mxjax.gemm_input import GemmInput
from mxjax.kernels.aot.quantize_builds import _H16, _PLAIN, gated_build
from mxjax.kernels.bench import bench_gated
from mxjax.kernels.quantize.gated import quantize_gated
from mxjax.kernels.selftest.kernels import run_build
from mxjax.kmajor import pack_by_definition
from mxjax.policy import Rotation
from mxjax.product import Product

ROWS = GemmInput(-1)
COLUMNS = [GemmInput(-2), GemmInput(-2, rotation=Rotation(4)), GemmInput(-2, rotation=Rotation(16))]


def draw_product(rng, r, n, scale=1.0):
    raw = jnp.asarray(scale * rng.standard_normal((r, n)), jnp.bfloat16)
    rows, columns = (jnp.asarray(np.exp2(rng.integers(-3, 4, size)), jnp.float32) for size in (r, n))
    return Product(raw, (rows, columns))


def draw_operand(kind, r, c, seed=0):
    rng = np.random.default_rng(seed)
    product = draw_product(rng, r, 2 * c)
    return Gated(product) if kind == "result" else GatedGradient(product, draw_product(rng, r, c, 2.0**-9))


def differing(x, columns):
    """Returns the share of bytes unlike those of the values that XLA computes."""
    wrong = total = 0
    for how, got in zip((ROWS, columns), quantize_gated(x, ROWS, columns), strict=True):
        wanted = pack_by_definition(x.value(), how)
        for a, b in ((got.elements, wanted.elements), (got.scales, wanted.scales)):
            assert a.shape == b.shape
            wrong, total = wrong + int(jnp.sum(a != b)), total + a.size
    return wrong / total


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("kind", ["result", "gradient"])
def test_it_quantizes_what_xla_computes(on_hopper, kind, columns):
    """Edges on both axes: rows end within a group, a block and a tile, columns within a tile."""
    assert differing(draw_operand(kind, 37, 160), columns) < 1e-3


def mlp(policy, seen):
    """Returns a gated MLP's loss by x and its weights, in one policy; `seen` gets which way it took."""

    def loss(x, gate_up, down):
        common = {"implementation": "triton"}
        y = fused_mlp(
            x, (gate_up, down), policies=[policy] * 2, keys=[None] * 2, layouts=[None] * 2, **common
        )
        seen.append(y is not None)
        if y is None:
            hidden = swiglu(mxjax.dot(x, gate_up, policy=policy, preferred_element_type=x.dtype, **common))
            y = mxjax.dot(hidden, down, policy=policy, preferred_element_type=x.dtype, **common)
        return jnp.sum(y.astype(jnp.float32) * jnp.sin(jnp.arange(y.size)).reshape(y.shape)), y

    return loss


def test_a_gated_mlp_has_the_result_and_the_gradients_of_two_products(on_hopper, monkeypatch):
    rng, policy = np.random.default_rng(2), mxjax.get_policy("wgrad_hadamard")
    x = jnp.asarray(rng.standard_normal((2, 40, 64)), jnp.bfloat16)
    weights = [jnp.asarray(rng.standard_normal(s) / 8, jnp.float32) for s in ((64, 192), (96, 64))]
    results, seen = [], []
    for fuse in (True, False):
        if not fuse:
            monkeypatch.setattr(gated_product, "_fuses", lambda *_: False)
        run = jax.jit(jax.value_and_grad(mlp(policy, seen), (0, 1, 2), has_aux=True))
        (_, y), gradients = run(x, *weights)
        results.append([y, *gradients])
    assert seen == [True, False]
    for fused, apart in zip(*results, strict=True):
        fused, apart = (np.asarray(t, np.float32) for t in (fused, apart))
        assert np.linalg.norm(fused - apart) <= 2e-3 * np.linalg.norm(apart)


@pytest.mark.parametrize("of_gradient", [False, True])
def test_builds_name_what_the_kernels_write(on_hopper, of_gradient):
    run_build(gated_build((200, 160), (_PLAIN, _H16), of_gradient))


def test_a_mapped_mlp_is_two_products_whose_tokens_are_all_quantized_together(on_hopper):
    rng, policy = np.random.default_rng(3), mxjax.get_policy("wgrad_hadamard")
    x = jnp.asarray(rng.standard_normal((2, 48, 64)), jnp.bfloat16)
    weights = [jnp.asarray(rng.standard_normal(s) / 8, jnp.float32) for s in ((64, 64), (32, 64))]
    together, mapped = mlp(policy, []), jax.vmap(mlp(policy, []), (0, None, None))
    wanted = jax.grad(lambda *weights: jnp.sum(together(x, *weights)[1].astype(jnp.float32)), (0, 1))(
        *weights
    )
    got = jax.grad(lambda *weights: jnp.sum(mapped(x, *weights)[1].astype(jnp.float32)), (0, 1))(*weights)
    for a, b in zip(got, wanted, strict=True):
        assert np.linalg.norm(a - b) <= 2e-3 * np.linalg.norm(b)


@pytest.mark.parametrize(
    ("changes", "fuses"),
    [
        ({}, True),
        ({"policy": "wgrad"}, True),
        ({"policy": "full_hadamard"}, False),  # rotated rows
        ({"policy": "wgrad_sr"}, False),
        ({"policy": "fprop_dgrad"}, False),  # columns in bfloat16
        ({"policy": "quartet", "implementation": None}, False),  # the gradient reads x itself
        ({"policy": "bf16"}, False),
        ({"implementation": "xla"}, False),
        ({"dtype": jnp.float32}, False),
        ({"width": 48}, False),  # gate and up share a block of the gradient's rows
        ({"target": Target("cuda", "sm_89")}, False),
        ({"target": Target("hip", "gfx950")}, False),
    ],
)
def test_where_kernels_compute_swiglu(changes, fuses):
    options = {"policy": "wgrad_hadamard", "implementation": "triton", "dtype": jnp.bfloat16, "width": 64}
    options |= {"target": Target("cuda", "sm_90")} | changes
    key, width = jax.random.key(0), options["width"]
    arguments = [
        jax.ShapeDtypeStruct((16, 32), options["dtype"]),
        *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((32, 2 * width), (width, 32))),
    ]

    def run(x, *weights):
        policies, common = [mxjax.get_policy(options["policy"])] * 2, {"layouts": [None] * 2}
        common["implementation"] = options["implementation"]
        return fused_mlp(x, weights, policies=policies, keys=[key] * 2, **common)

    with use_target(options["target"]):
        assert (jax.eval_shape(run, *arguments) is not None) == fuses


@pytest.mark.slow
def test_the_benchmark_reports_every_case(on_hopper, capsys):
    bench_gated.main(["--shapes", "32x32", "--rounds", "1", "--commit", "abc"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(report["records"]) == 6
    assert all("median" in record for record in report["records"])
    with pytest.raises(SystemExit, match="a multiple of 32"):
        bench_gated.main(["--shapes", "32x48"])
