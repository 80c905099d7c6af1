"""The kernel that casts to FP8, beside the definition."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax.kernels.cases.quantize import cast_build
from mxjax.kernels.quantize.fp8 import quantize_fp8, takes
from mxjax.kernels.selftest.kernels import run_build
from mxjax.numerics.operand import Operand
from mxjax.operands.kernel_operand import fp8_by_definition
from mxjax.operands.use import OperandUse
from mxjax.policy import Rotation
from mxjax.runtime.devices import Target

E4M3, E5M2 = Operand(format="fp8_e4m3"), Operand(format="fp8_e5m2")
ROWS, COLUMNS = OperandUse(-1, E4M3), OperandUse(-2, E4M3)


def assert_equal(got, wanted):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def check(x, uses):
    assert_equal(
        jax.jit(quantize_fp8, static_argnums=1)(x, uses), [fp8_by_definition(x, use) for use in uses]
    )


def draw(shape, dtype="bfloat16"):
    x = np.random.default_rng(0).standard_normal(shape) * np.exp2(np.arange(shape[-1]) % 24 - 12)
    return jnp.asarray(x, dtype)


@pytest.mark.parametrize(
    ("shape", "dtype", "uses"),
    [
        ((128, 64), "bfloat16", (ROWS, COLUMNS)),
        ((48, 80), "float32", (COLUMNS, ROWS)),  # edges of a tile on both axes
        ((2, 16, 16), "float16", (OperandUse(-1, E5M2), COLUMNS)),
        ((144, 16), "bfloat16", (ROWS,)),
        ((16, 144), "float32", (OperandUse(-2, E5M2),)),
    ],
)
def test_it_casts_as_defined(on_hopper, shape, dtype, uses):
    check(draw(shape, dtype), uses)


@pytest.mark.parametrize(("dtype", "hidden"), [("bfloat16", 1), ("float32", 0)])
def test_a_weight_is_behind_no_barrier(on_hopper, dtype, hidden):
    """XLA copies a slice of a stack for a barrier, and casts an unhidden one where it is."""
    program = jax.make_jaxpr(lambda x: [q.elements for q in quantize_fp8(x, (ROWS, COLUMNS))])(
        draw((48, 80), dtype)
    )
    behind = [e.invars for e in program.eqns if e.primitive.name == "optimization_barrier"]
    assert sum(v.aval.shape == (48, 80) for invars in behind for v in invars) == hidden


@pytest.mark.parametrize("value", [0.0, -0.0, np.nan, np.inf, -np.inf, 1e-38, 3e38, 2.0**-120])
@pytest.mark.parametrize("rest", [0.0, 1.0])
def test_special_values(on_hopper, value, rest):
    check(jnp.full((16, 16), rest).at[3, 5].set(value), (ROWS, COLUMNS))


def test_ties_and_every_code(on_hopper):
    """All codes and the middles between neighbours, with the largest code as maximum: the scale is one."""
    codes = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
    codes = np.sort(codes[np.isfinite(codes)])
    x = np.zeros(512, np.float32)
    x[: codes.size], x[256 : 255 + codes.size] = codes, (codes[1:] + codes[:-1]) / 2
    check(jnp.asarray(x.reshape(16, 32)), (ROWS, COLUMNS))


@pytest.mark.parametrize("maxima", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_builds_name_what_the_kernel_writes(on_hopper, dtype, maxima):
    assert run_build(cast_build((208, 144), dtype, maxima)) == {}


def check_delayed(x):
    """Checks both orientations by delayed scales, and x's largest magnitude, beside the definitions."""
    delayed = [dataclasses.replace(operand, scaling="delayed") for operand in (E4M3, E5M2)]

    def uses(scales):
        return [OperandUse(-1 - i, delayed[i], scale=scales[i]) for i in range(2)]

    scales = jnp.array([3.0, 0.7], jnp.float32)
    got = jax.jit(lambda x, scales: quantize_fp8(x, uses(scales)))(x, scales)
    amax = jnp.max(jnp.abs(x.astype(jnp.float32)))
    assert_equal(got, [dataclasses.replace(fp8_by_definition(x, use), amax=amax) for use in uses(scales)])


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((128, 64), "bfloat16"), ((208, 144), "float32"), ((2, 48, 16), "float16"), ((272, 80), "bfloat16")],
)
def test_delayed_scales_and_the_largest_magnitude_in_one_read(on_hopper, shape, dtype):
    check_delayed(draw(shape, dtype))


@pytest.mark.parametrize("value", [-9.0, 0.0, np.nan, np.inf, -np.inf, 1e-38, -3e38])
def test_special_values_with_delayed_scales(on_hopper, value):
    """Infinity saturates and NaN stays alone, where a current scale makes the tensor NaN."""
    check_delayed(jnp.full((48, 80), 0.5).at[47, 79].set(value))


def test_each_mapped_call_has_its_own_scale(on_hopper):
    x = draw((3, 16, 32)) * jnp.exp2(jnp.arange(3.0))[:, None, None].astype(jnp.bfloat16)
    mapped = jax.vmap(lambda x: quantize_fp8(x, (ROWS, COLUMNS)))(x)
    each = [quantize_fp8(part, (ROWS, COLUMNS)) for part in x]
    assert_equal(mapped, jax.tree.map(lambda *parts: jnp.stack(parts), *each))


@pytest.mark.parametrize(
    ("use", "target", "shape", "taken"),
    [
        (ROWS, Target("cuda", "sm_90"), (16, 32), True),
        (ROWS, Target("cuda", "sm_80"), (16, 32), False),
        (ROWS, Target("hip", "gfx950"), (16, 32), False),
        (ROWS, None, (16, 32), False),
        (ROWS, Target("cuda", "sm_90"), (16, 40), False),
        (ROWS, Target("cuda", "sm_90"), (0, 32), False),
        (
            OperandUse(-1, dataclasses.replace(E4M3, rounding="stochastic")),
            Target("cuda", "sm_90"),
            (16, 32),
            False,
        ),
        (OperandUse(-1, E4M3, Rotation(16)), Target("cuda", "sm_90"), (16, 32), False),
    ],
)
def test_what_it_takes(use, target, shape, taken):
    assert takes((use,), target, shape) == taken


def test_dot_multiplies_what_the_definition_does(on_hopper):
    shapes = ((512, 256), (256, 128), (512, 128))
    # In bfloat16 the scales, 9 / 448 and 9 / 57344, would be 0.26 % too large.
    draws = [jax.random.normal(jax.random.key(i), shape, jnp.float32) for i, shape in enumerate(shapes)]
    x, w, dy = (t.at[0, 0].set(9.0) for t in draws)
    x, dy = x.astype(jnp.bfloat16), dy.astype(jnp.bfloat16)
    results = []
    for implementation in ("fp8_carriers", "reference"):

        @jax.jit
        def run(x, w, dy, implementation=implementation):
            y, vjp = jax.vjp(lambda x, w: mxjax.dot(x, w, policy="fp8", implementation=implementation), x, w)
            return y, *vjp(dy.astype(y.dtype))

        results.append(run(x, w, dy))
    for a, b in zip(*results, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.linalg.norm(a - b) <= 3e-3 * np.linalg.norm(b)
        assert abs(np.vdot(a, b) / np.vdot(b, b) - 1) < 3e-4
