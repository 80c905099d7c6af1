"""The quantizer kernel against the definitions in `mxjax`, bit for bit, and against torchao and gfloat."""

import pathlib

import gfloat
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import oracles
from support.quantizer import DTYPES, assert_as_defined, draw_tensor

import mxjax
from mxjax.kernels.device.hadamard import rotate_groups
from mxjax.kernels.device.philox import random_halves
from mxjax.kernels.launch import triton_call
from mxjax.kernels.quantize import launches, quantizer
from mxjax.kernels.quantize.quantizer import quantize_operands
from mxjax.numerics.operand import Operand
from mxjax.numerics.philox import random_uint16
from mxjax.operands.use import OperandUse
from mxjax.policy import Rotation
from mxjax.runtime.devices import Target

RULES = ("floor", "even", "uos", "rceil", "ceil")


operands = st.builds(
    Operand,
    scale_rule=st.sampled_from(RULES),
    rounding=st.sampled_from(["nearest", "stochastic"]),
    prescale=st.sampled_from([None, 0.75]),
    block_shape=st.sampled_from([None, 32, (1, 32), (32, 32)]),
)
rotations = (
    st.builds(Rotation, st.sampled_from([2, 4, 8, 16]), st.sampled_from(["none", "fixed", "redrawn"]))
    | st.none()
)
rows = st.builds(lambda *use: OperandUse(-1, *use), operands, rotations)
columns = st.builds(lambda *use: OperandUse(-2, *use), operands, rotations)
forms = st.sampled_from(["packed", "bf16"])
shapes = st.tuples(st.lists(st.integers(1, 2), max_size=2), st.integers(1, 80), st.integers(1, 80)).map(
    lambda s: (*s[0], *s[1:])
)
tensors = (shapes, st.sampled_from(["normal", "wide", "special", "grid"]), st.sampled_from(sorted(DTYPES)))
wanted = st.one_of(st.tuples(rows), st.tuples(columns), st.tuples(rows, columns))

ROWS, COLUMNS, ROWS_H16 = OperandUse(-1), OperandUse(-2), OperandUse(-1, rotation=Rotation(16))
COLUMNS_H16 = OperandUse(-2, rotation=Rotation(16))
COLUMNS_H64 = OperandUse(-2, rotation=Rotation(64, "redrawn"))
ROWS_H128 = OperandUse(-1, Operand(block_shape=(32, 32)), Rotation(128, "fixed"))
COLUMNS_H128 = OperandUse(-2, Operand(rounding="stochastic", prescale=0.75), Rotation(128, "redrawn"))
SQUARE_ROWS = OperandUse(-1, Operand(block_shape=(32, 32)))
SQUARE_COLUMNS_H128 = OperandUse(-2, Operand(block_shape=(32, 32)), Rotation(128))


def check_options(shape, kind, dtype, inputs, form, seed):
    x = draw_tensor(np.random.default_rng(seed), shape, kind, dtype)
    assert_as_defined(x, *inputs, form=form, seed=seed)


@pytest.fixture(scope="module")
def nvidia_tiles():
    """Makes the kernel take the tiles of NVIDIA GPUs, with groups of 32 mostly, in the interpreter too."""
    tile = launches._tile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launches, "_tile", lambda _, *args: tile(Target("cuda", "sm_90"), *args))
        quantizer._quantizer.cache_clear()
        yield
    quantizer._quantizer.cache_clear()


@pytest.mark.slow
@settings(max_examples=15)
@given(*tensors, wanted, forms, st.integers(0, 2**16))
@example((1, 1), "normal", "bfloat16", (ROWS, COLUMNS), "packed", 0)
@example((2, 1, 33), "normal", "float32", (ROWS, COLUMNS_H16), "packed", 0)
def test_any_options(shape, kind, dtype, inputs, form, seed):
    check_options(shape, kind, dtype, inputs, form, seed)


@pytest.mark.exhaustive
@settings(max_examples=50)
@given(*tensors, wanted, forms, st.integers(0, 2**16))
@example((130, 140), "wide", "bfloat16", (ROWS_H128, COLUMNS_H128), "packed", 0)
@example((33, 65), "special", "float32", (ROWS, COLUMNS_H128), "bf16", 0)
def test_any_options_at_length(shape, kind, dtype, inputs, form, seed):
    check_options(shape, kind, dtype, inputs, form, seed)


@pytest.mark.slow
@pytest.mark.usefixtures("nvidia_tiles")
@settings(max_examples=2)
@given(*tensors, wanted, forms, st.integers(0, 2**16))
@example((2, 33, 70), "normal", "float32", (ROWS, COLUMNS_H64), "packed", 0)
@example((17, 600), "wide", "bfloat16", (ROWS_H16,), "packed", 0)
@example((5, 1100), "wide", "bfloat16", (ROWS_H16,), "packed", 0)
@example((33, 70), "normal", "bfloat16", (SQUARE_ROWS,), "packed", 0)
@example((33, 40), "normal", "bfloat16", (SQUARE_COLUMNS_H128,), "packed", 0)
def test_nvidia_tiles(shape, kind, dtype, inputs, form, seed):
    check_options(shape, kind, dtype, inputs, form, seed)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("nvidia_tiles")
@settings(max_examples=30)
@given(*tensors, wanted, forms, st.integers(0, 2**16))
@example((130, 140), "wide", "bfloat16", (ROWS_H128, COLUMNS_H128), "packed", 0)
@example((33, 65), "special", "float32", (ROWS, COLUMNS_H128), "bf16", 0)
def test_nvidia_tiles_at_length(shape, kind, dtype, inputs, form, seed):
    check_options(shape, kind, dtype, inputs, form, seed)


@pytest.mark.parametrize(
    ("rule", "form"),
    [
        *((rule, "packed") for rule in RULES),
        *(pytest.param(r, "bf16", marks=() if r == "floor" else pytest.mark.slow) for r in RULES),
    ],
)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_rules_and_roundings(rule, rounding, form):
    x = draw_tensor(np.random.default_rng(0), (64, 64), "wide", "bfloat16")
    plain, prescaled = (Operand(scale_rule=rule, rounding=rounding, prescale=p) for p in (None, 0.75))
    assert_as_defined(x, OperandUse(-1, plain), OperandUse(-2, prescaled), form=form)


@pytest.mark.parametrize(
    ("size", "signs"),
    [
        *((size, signs) for size in (2, 4, 8, 16, 32) for signs in ("none", "redrawn")),
        (128, "redrawn"),
        *(pytest.param(64, signs, marks=pytest.mark.exhaustive) for signs in ("none", "redrawn")),
        pytest.param(128, "none", marks=pytest.mark.exhaustive),
    ],
)
def test_rotations(size, signs):
    x = draw_tensor(np.random.default_rng(1), (40, 100), "normal", "bfloat16")
    rotation = Rotation(size, signs)
    for form in ("packed", "bf16"):
        assert_as_defined(x, *(OperandUse(axis, rotation=rotation) for axis in (-1, -2)), form=form)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_square_blocks(dtype):
    x = draw_tensor(np.random.default_rng(2), (2, 70, 90), "wide", dtype)
    square = Operand(block_shape=(32, 32), scale_rule="even")
    assert_as_defined(x, OperandUse(-1, square), OperandUse(-2, square))


@pytest.mark.parametrize(
    ("dtype", "order"),
    [
        ("bfloat16", "sorted"),
        ("float16", "shuffled"),
        pytest.param("bfloat16", "shuffled", marks=pytest.mark.exhaustive),
        pytest.param("float16", "sorted", marks=pytest.mark.exhaustive),
    ],
)
def test_all_bit_patterns(dtype, order):
    """Sorted, each is among the largest of its block; shuffled, it is beside any other finite one."""
    patterns = np.arange(2**16, dtype=np.uint16)
    values = patterns.view(DTYPES[dtype])
    if order == "shuffled":
        finite = patterns[np.isfinite(values.astype(np.float32))]
        patterns = np.resize(np.random.default_rng(3).permutation(finite), 2**16)
    assert_as_defined(jnp.asarray(patterns.view(DTYPES[dtype]).reshape(1024, 64)), ROWS)


@pytest.mark.parametrize("scale", [-149, -140, -127, -126, -125, 0, 126, 127])
def test_magnitudes_at_both_ends_of_float32(scale):
    rng = np.random.default_rng(4)
    with np.errstate(over="ignore"):
        x = (rng.uniform(-2, 2, (32, 64)) * 2.0**scale).astype(np.float32)
    for form in ("packed", "bf16"):
        assert_as_defined(jnp.asarray(x), ROWS, OperandUse(-2, Operand(scale_rule="even")), form=form)


def test_special_values():
    x = np.ones((8, 64), np.float32)
    x[0, 3], x[1, 40], x[2, 0], x[3, :32], x[4, :32], x[5, 0] = np.nan, np.inf, -np.inf, 0, -0.0, -np.nan
    x[6, ::2] *= -0.0
    for form in ("packed", "bf16"):
        assert_as_defined(jnp.asarray(x), ROWS, COLUMNS_H16, form=form)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_nan_blocks_leave_their_neighbours_alone(dtype):
    x = np.array(draw_tensor(np.random.default_rng(6), (96, 96), "grid", dtype))
    x[::3, 40] = np.nan
    x[40, ::3] = np.nan
    assert_as_defined(jnp.asarray(x), ROWS, COLUMNS)
    assert_as_defined(jnp.asarray(x), COLUMNS)


# --- what nobody here wrote

GOLDEN = np.load(pathlib.Path(__file__).parents[2] / "golden" / "torchao_mx.npz")


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("rule", ["floor", "even", "rceil", "ceil"])
@pytest.mark.parametrize("section", ["gauss", "ties"])
def test_torchao(section, rule, dtype):
    """tests/golden/make_torchao.py says where torchao departs from the definition: here at scale byte 0."""
    x = GOLDEN[f"input/{dtype}/{section}"]
    x = jnp.asarray(x.view(np.float32 if dtype == "f32" else ml_dtypes.bfloat16))
    scales, codes = (GOLDEN[f"mxfp4/{dtype}/{rule}/{section}/{name}"] for name in ("scale", "codes"))
    operand = Operand(scale_rule=rule)
    [rows], [columns] = (
        quantize_operands(t, [OperandUse(axis, operand)]) for t, axis in ((x, -1), (x.T, -2))
    )
    same = scales != 0
    assert same.mean() > 0.9
    for got in (rows, columns):
        np.testing.assert_array_equal(got.scales, scales)
        blocks = (x.reshape(*scales.shape, 16)[same] for x in (np.asarray(got.elements), codes))
        np.testing.assert_array_equal(*blocks)


@pytest.mark.parametrize("rule", RULES)
def test_gfloat(rule):
    x = np.array(draw_tensor(np.random.default_rng(5), (33, 64), "wide", "float32"))
    scales, values = oracles.quantize(x, oracles.ELEMENT_INFO["e2m1"], rule)
    [rows] = quantize_operands(jnp.asarray(x), [OperandUse(-1, Operand(scale_rule=rule))])
    codes = np.stack([rows.elements & 15, rows.elements >> 4], -1).reshape(x.shape)
    np.testing.assert_array_equal(rows.scales, scales)
    decoded = gfloat.decode_ndarray(oracles.ELEMENT_INFO["e2m1"], codes)
    np.testing.assert_array_equal(oracles.bits(decoded), oracles.bits(values))


# --- the parts


@triton.jit
def halves_kernel(key, out, GROUPS: tl.constexpr, OTHER: tl.constexpr):
    group, other = tl.arange(0, GROUPS)[:, None], tl.arange(0, OTHER)[None, :]
    zero = tl.zeros([GROUPS, OTHER], tl.uint32)
    counter, row = zero + group.to(tl.uint32), zero + other.to(tl.uint32)
    halves = random_halves(counter, row, tl.load(key), tl.load(key + 1), False)
    for i in tl.static_range(8):
        tl.store(out + (other * GROUPS + group) * 8 + i, halves[i].to(tl.int32))


def test_philox():
    key = jax.random.key(6)
    out = jax.ShapeDtypeStruct((16, 64), jnp.int32)
    words = jax.random.bits(key, (2,), jnp.uint32)
    [halves] = triton_call(halves_kernel, words, out=[out], grid=(1,), GROUPS=8, OTHER=16)
    np.testing.assert_array_equal(halves, random_uint16(key, (16, 64)))


@triton.jit
def rotate_kernel(
    x,
    out,
    SIZE: tl.constexpr,
    FACTOR: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    OTHER: tl.constexpr,
):
    at = tl.arange(0, OTHER)[None, :] * (GROUPS * GROUP) + tl.arange(0, GROUPS)[:, None] * GROUP
    xs = ()
    for i in tl.static_range(GROUP):
        xs = xs + (tl.load(x + at + i),)  # noqa: RUF005
    ys = rotate_groups(xs, SIZE, GROUP, GROUPS, OTHER, FACTOR)
    for i in tl.static_range(GROUP):
        tl.store(out + at + i, ys[i])


@pytest.mark.parametrize("group", [8, 32])
@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64, 128])
def test_butterfly(size, group):
    x = jax.random.normal(jax.random.key(7), (8, 128))
    constants = {
        "SIZE": size,
        "GROUP": group,
        "GROUPS": 128 // group,
        "OTHER": 8,
        "FACTOR": float(np.float32(size**-0.5)),
    }
    [y] = triton_call(rotate_kernel, x, out=[jax.ShapeDtypeStruct(x.shape, x.dtype)], grid=(1,), **constants)
    np.testing.assert_array_equal(oracles.bits(y), oracles.bits(mxjax.rotate(x, size)))
