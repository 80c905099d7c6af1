"""The quantizer kernel under transformations, on a part of a tensor, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.dots import assert_same
from support.quantizer import draw

import mxjax
from mxjax.kernels.launch import MOST_PROGRAMS
from mxjax.kernels.quantize import launches
from mxjax.kernels.quantize.quantizer import elements_of, launch_pair, quantize_operands
from mxjax.numerics.operand import Operand
from mxjax.operands.kernel_operand import pack_by_definition
from mxjax.operands.use import OperandUse
from mxjax.policy import Rotation
from mxjax.products.prepare import prepare
from mxjax.runtime.devices import Target, current_target, use_target

# --- transformations

ROWS = OperandUse(-1)
STOCHASTIC = OperandUse(-2, Operand(rounding="stochastic"), Rotation(16, "redrawn"))


def quantize_both(x, key):
    """Returns what the kernel makes of x: row-wise by nearest, column-wise with all that a key draws."""
    rows, columns = quantize_operands(x, [ROWS, draw(key, STOCHASTIC)])
    return rows.elements, rows.scales, columns.elements, columns.scales


def assert_each(got, x, keys):
    """Checks results with a leading axis against one call for each."""
    for i in range(len(got[0])):
        assert_same([a[i] for a in got], quantize_both(x[i], keys[i]))


X = np.asarray(jax.random.normal(jax.random.key(8), (3, 2, 33, 40)))
KEYS = jax.random.split(jax.random.key(9), 3)


@pytest.mark.slow
def test_vmap_twice():
    grid = jax.vmap(jax.vmap(quantize_both, (None, 0)), (0, None))(X[:2, 0], KEYS)
    for i in range(2):
        assert_each([a[i] for a in grid], [X[i, 0]] * 3, KEYS)
    grid = jax.vmap(jax.vmap(quantize_both, (0, None)))(X, KEYS)
    for i in range(3):
        assert_each([a[i] for a in grid], X[i], [KEYS[i]] * 2)


def test_vmap_equals_vmap_of_the_definition():
    def kernel(x, key):
        use = OperandUse(-1, Operand(rounding="stochastic"), key=key)
        return quantize_operands(x, [use])[0].elements

    def definition(x, key):
        return mxjax.pack(mxjax.quantize(x, rounding="stochastic", key=key))

    x = X[..., :32]
    for axes in ((0, 0), (0, None), (None, 0)):
        args = (x if axes[0] == 0 else x[0], KEYS if axes[1] == 0 else KEYS[0])
        np.testing.assert_array_equal(jax.vmap(kernel, axes)(*args), jax.vmap(definition, axes)(*args))


def test_scan():
    _, got = jax.lax.scan(lambda carry, xs: (carry, quantize_both(*xs)), 0, (X, KEYS))
    assert_each(got, X, KEYS)


def test_rows_in_any_number_are_few_programs():
    """CUDA runs 65535 programs along all axes but one; what needs more is quantized by the definition."""
    columns, target = OperandUse(-2), Target("cuda", "sm_90")
    for pair in ((ROWS, None), (None, columns), (ROWS, columns)):
        for shape in ((1, 1, 2**21, 64), (1, 1, 64, 2**21)):
            launch = launches.launch_of(pair, "packed", target, shape, "bfloat16")
            assert max(launch.grid[1:]) <= MOST_PROGRAMS, (pair, shape)
            assert launches.fit(pair, "packed", target, shape, "bfloat16")
    for shape in ((2**24 - 1, 64), (70_000, 64, 64), (2**24, 64)):
        assert not launches.fit((ROWS, None), "packed", target, shape, "bfloat16")
        x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        with use_target(target):
            jax.eval_shape(lambda x: jax.tree.leaves(prepare(x, [ROWS._replace(form="bf16")])), x)
    assert launches.fit((ROWS, None), "packed", Target("hip", "gfx950"), (2**24 - 1, 64), "bfloat16")


def test_float64_is_quantized_as_its_float32():
    x = np.random.default_rng(0).normal(size=(40, 70))
    wanted = quantize_operands(jnp.asarray(x, jnp.float32), [ROWS])
    with jax.enable_x64(True):
        got = quantize_operands(jnp.asarray(x), [ROWS])
    assert_same(jax.tree.leaves(got), jax.tree.leaves(wanted))


def test_a_part_draws_the_bits_of_its_place_in_the_whole():
    whole = jax.random.normal(jax.random.key(0), (3, 256, 192))
    keys = [jax.random.key(i) for i in (1, 2)]
    stochastic = Operand(rounding="stochastic")
    pair = OperandUse(-1, stochastic), OperandUse(-2, stochastic, Rotation(16))
    words = [jax.random.bits(key, (2,), jnp.uint32) for key in keys]
    scalars = jnp.concatenate([jnp.pad(w, (0, 4)) for w in words])[None]
    b, r, c = slice(1, 3), slice(64, 192), slice(32, 160)
    places = [jnp.arange(s.start, s.stop, dtype=jnp.uint32) for s in (b, r, c)]
    part = whole[b, r, c][None]
    got = launch_pair(pair, "packed", current_target(), (256, 192), part, scalars, *places)
    for use, key, (elements, scales) in zip(pair, keys, (got[:2], got[2:]), strict=True):
        q = jax.jit(functools.partial(pack_by_definition, use=use._replace(key=key)))(whole)
        other, blocked = (r, c) if use.axis == -1 else (c, r)
        packed = q.elements[b, other, blocked.start // 2 : blocked.stop // 2]
        np.testing.assert_array_equal(elements_of(elements, "packed")[0], packed)
        np.testing.assert_array_equal(scales[0], q.scales[b, other, blocked.start // 32 : blocked.stop // 32])


# --- what it refuses


@pytest.mark.parametrize(
    "operand", [Operand("mxfp8_e4m3"), Operand("nvfp4"), Operand(block_shape=16), Operand(block_shape=(1, 8))]
)
def test_refuses_other_formats_and_blocks(operand):
    with pytest.raises(NotImplementedError, match="mxfp4"):
        quantize_operands(jnp.ones((32, 32)), [OperandUse(-1, operand)])


def test_refuses_larger_rotations_and_longer_axes():
    with pytest.raises(NotImplementedError, match="H128"):
        quantize_operands(jnp.ones((32, 256)), [OperandUse(-1, rotation=Rotation(256))])
    with pytest.raises(ValueError, match="shorter"):
        jax.eval_shape(lambda x: quantize_operands(x, [ROWS]), jax.ShapeDtypeStruct((1, 2**24), jnp.bfloat16))
