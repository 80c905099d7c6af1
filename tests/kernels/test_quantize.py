"""The quantizer kernel against the definitions in `mxjax`, bit for bit, and against torchao and gfloat."""

import dataclasses
import pathlib

import gfloat
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracles
import pytest
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st

import mxjax
from mxjax.kernels import operands as kernel_operands
from mxjax.kernels import sides as kernel_sides
from mxjax.kernels.hadamard import rotate_groups
from mxjax.kernels.launch import MOST_PROGRAMS, Target, current_target, triton_call
from mxjax.kernels.operands import Random, _call, _from_words, quantize_operands
from mxjax.kernels.philox import random_halves
from mxjax.kernels.sides import Side
from mxjax.operands import Use
from mxjax.packed import pack_by_definition
from mxjax.philox import random_uint16
from mxjax.policy import Operand, Rotation

RULES = ("floor", "even", "uos", "rceil", "ceil")
FP8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float16": np.float16}
GRID = np.array([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 6.99, 7], np.float32)


def draw_tensor(rng, shape, kind, dtype):
    """Returns random numbers: normal, of all magnitudes, with special values, or E2M1's values and ties."""
    x = rng.standard_normal(shape).astype(np.float32)
    if kind == "wide":
        x *= np.exp2(rng.integers(-12, 8, shape)).astype(np.float32)
        x[..., :32] *= np.float32(2.0 ** rng.integers(-30, 30)) if dtype != "float16" else 1
    elif kind == "special":
        chosen = rng.random(shape)
        for value, below in ((np.nan, 0.01), (-np.inf, 0.02), (0, 0.2), (-0.0, 0.3)):
            x = np.where((chosen < below) & (chosen >= below / 2), np.float32(value), x)
    elif kind == "grid":
        x = rng.choice(np.concatenate([GRID, -GRID]), shape)
    with np.errstate(over="ignore"):
        return jnp.asarray(x.astype(DTYPES[dtype]))


def draw_side_random(key, side):
    """Returns the JAX key of a side, and what it draws from it: key words, and signs if it has any."""
    signs = None
    if side.rotation and side.rotation.signs != "none":
        signs = mxjax.random_signs(jax.random.fold_in(key, 1), side.rotation.size)
    return key, Random(jax.random.bits(key, (2,), jnp.uint32), signs)


def define(x, side, axis, key, signs):
    """Returns what the definitions make of x: elements [*b, other, length], bytes [*b, other, blocks]."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, side.length(x.shape[axis]) - x.shape[axis])
    x = jnp.asarray(np.pad(x, widths))  # XLA flushes subnormals of bfloat16 where it fills up
    if side.rotation:
        x = mxjax.rotate(x, side.rotation.size, axis=axis, signs=signs)
    o = side.operand
    q = mxjax.quantize(
        x,
        axis=axis,
        scale_rule=o.scale_rule,
        rounding=o.rounding,
        block_shape=o.block_shape,
        prescale=o.prescale,
        key=key if o.rounding == "stochastic" else None,
    )
    elements, scales = np.asarray(q.elements), np.asarray(q.scales).view(np.uint8)
    if axis == -2:
        elements, scales = elements.swapaxes(-1, -2), scales.swapaxes(-1, -2)
    if o.block_shape == (32, 32):
        scales = np.repeat(scales, 32, axis=-2)[..., : elements.shape[-2], :]
    return elements, scales


def check(got, side, elements, scales, reference=0):
    """Checks what the kernel wrote of one side, in any form, against elements and scale bytes."""
    codes = elements.view(np.uint8)
    written = np.asarray(got.elements)
    if side.form == "packed":
        np.testing.assert_array_equal(got.scales, scales)
        np.testing.assert_array_equal(written, codes[..., ::2] | codes[..., 1::2] << 4)
        return
    spread = np.repeat(scales, 32, axis=-1)
    values = elements.astype(np.float64)
    shift = spread.astype(np.int64) - (127 if side.form == "bf16" else reference)
    if side.form == "bf16":
        np.testing.assert_array_equal(got.scales, scales)
        kept = np.ones_like(spread, bool)
        dtype = ml_dtypes.bfloat16
    else:
        dtype = FP8[side.form]
        lost = np.asarray(got.scales)
        np.testing.assert_array_equal(lost[scales == 255], 0)
        some = np.any((codes & 7).reshape(*scales.shape, 32) != 0, axis=-1) & (scales != 255)
        np.testing.assert_array_equal(lost[some], ~exact_in(dtype, shift[..., ::32][some]))
        kept = np.repeat(lost == 0, 32, axis=-1)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = np.where(spread == 255, np.nan, np.ldexp(values, shift)).astype(dtype).astype(np.float32)
    actual = written.astype(np.float32)
    np.testing.assert_array_equal(actual[kept], expected[kept])
    signed = kept & (spread != 255)
    np.testing.assert_array_equal(np.signbit(actual[signed]), np.signbit(expected[signed]))


def exact_in(dtype, shifts):
    """Returns whether every E2M1 value times 2**shift is one of dtype."""
    values = np.ldexp(np.array([0.5, 1, 1.5, 2, 3, 4, 6]), np.asarray(shifts)[..., None])
    with np.errstate(over="ignore"):
        return np.all(values.astype(dtype).astype(np.float64) == values, axis=-1)


def assert_as_defined(x, rows=None, columns=None, seed=0):
    """Quantizes x both ways and checks each side that is wanted."""
    sides, keys, randoms, expected = (rows, columns), [], [], []
    for i, side in enumerate(sides):
        key, random = draw_side_random(jax.random.key(seed + i), side) if side else (None, Random())
        made = define(x, side, i - 1 if i == 0 else -2, key, random.signs) if side else None
        reference = 0
        if side and side.form in FP8:
            reference = int(np.median(made[1]))
            random = random._replace(reference=jnp.int32(reference))
        keys.append(reference)
        randoms.append(random)
        expected.append(made)
    results = quantize_operands(x, *sides, row_random=randoms[0], column_random=randoms[1])
    for side, reference, made, got in zip(sides, keys, expected, results, strict=True):
        assert (got is None) == (side is None)
        if side:
            check(got, side, *made, reference)


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
sides = st.builds(Side, operands, rotations, st.sampled_from(["packed", "bf16", "e4m3", "e5m2"]))
shapes = st.tuples(st.lists(st.integers(1, 2), max_size=2), st.integers(1, 80), st.integers(1, 80)).map(
    lambda s: (*s[0], *s[1:])
)
tensors = (shapes, st.sampled_from(["normal", "wide", "special", "grid"]), st.sampled_from(sorted(DTYPES)))
pairs = st.one_of(st.tuples(sides, st.none()), st.tuples(st.none(), sides), st.tuples(sides, sides))


def check_options(shape, kind, dtype, pair, seed):
    assert_as_defined(draw_tensor(np.random.default_rng(seed), shape, kind, dtype), *pair, seed=seed)


@pytest.fixture(scope="module")
def nvidia_tiles():
    """Makes the kernel take the tiles of NVIDIA GPUs, with groups of 32 mostly, in the interpreter too."""
    tile = kernel_sides._tile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_sides, "_tile", lambda _, *args: tile(Target("cuda", "sm_90"), *args))
        kernel_operands._quantizer.cache_clear()
        yield
    kernel_operands._quantizer.cache_clear()


@settings(max_examples=15)
@given(*tensors, pairs, st.integers(0, 2**16))
@example((1, 1), "normal", "bfloat16", (Side(Operand()), Side(Operand())), 0)
@example((2, 1, 33), "normal", "float32", (Side(Operand()), Side(Operand(), Rotation(16))), 0)
def test_any_options(shape, kind, dtype, pair, seed):
    check_options(shape, kind, dtype, pair, seed)


@pytest.mark.slow
@settings(max_examples=80)
@given(*tensors, pairs, st.integers(0, 2**16))
def test_any_options_at_length(shape, kind, dtype, pair, seed):
    check_options(shape, kind, dtype, pair, seed)


@pytest.mark.usefixtures("nvidia_tiles")
@settings(max_examples=2)
@given(*tensors, pairs, st.integers(0, 2**16))
@example((2, 33, 70), "normal", "float32", (Side(Operand()), Side(Operand(), Rotation(64, "redrawn"))), 0)
@example((17, 600), "wide", "bfloat16", (Side(Operand(), Rotation(16)), None), 0)
@example((33, 70), "normal", "bfloat16", (Side(Operand(block_shape=(32, 32))), None), 0)
def test_nvidia_tiles(shape, kind, dtype, pair, seed):
    check_options(shape, kind, dtype, pair, seed)


@pytest.mark.slow
@pytest.mark.usefixtures("nvidia_tiles")
@settings(max_examples=40)
@given(*tensors, pairs, st.integers(0, 2**16))
def test_nvidia_tiles_at_length(shape, kind, dtype, pair, seed):
    check_options(shape, kind, dtype, pair, seed)


@pytest.mark.parametrize("form", ["packed", "bf16", "e4m3", "e5m2"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("rule", RULES)
def test_rules_and_roundings(rule, rounding, form):
    x = draw_tensor(np.random.default_rng(0), (64, 64), "wide", "bfloat16")
    side = Side(Operand(scale_rule=rule, rounding=rounding), form=form)
    assert_as_defined(
        x, side, dataclasses.replace(side, operand=dataclasses.replace(side.operand, prescale=0.75))
    )


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("signs", ["none", "redrawn"])
def test_rotations(size, signs):
    x = draw_tensor(np.random.default_rng(1), (40, 70), "normal", "bfloat16")
    assert_as_defined(
        x, Side(Operand(), Rotation(size, signs)), Side(Operand(), Rotation(size, signs), "bf16")
    )


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_square_blocks(dtype):
    x = draw_tensor(np.random.default_rng(2), (2, 70, 90), "wide", dtype)
    side = Side(Operand(block_shape=(32, 32), scale_rule="even"))
    assert_as_defined(x, side, side)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_all_bit_patterns(dtype, order):
    """Sorted, each is among the largest of its block; shuffled, it is beside any other finite one."""
    patterns = np.arange(2**16, dtype=np.uint16)
    values = patterns.view(DTYPES[dtype])
    if order == "shuffled":
        finite = patterns[np.isfinite(values.astype(np.float32))]
        patterns = np.resize(np.random.default_rng(3).permutation(finite), 2**16)
    assert_as_defined(jnp.asarray(patterns.view(DTYPES[dtype]).reshape(1024, 64)), Side(Operand()))


@pytest.mark.parametrize("scale", [-149, -140, -127, -126, -125, 0, 126, 127])
def test_magnitudes_at_both_ends_of_float32(scale):
    rng = np.random.default_rng(4)
    with np.errstate(over="ignore"):
        x = (rng.uniform(-2, 2, (32, 64)) * 2.0**scale).astype(np.float32)
    assert_as_defined(jnp.asarray(x), Side(Operand()), Side(Operand(scale_rule="even"), form="bf16"))


def test_special_values():
    x = np.ones((8, 64), np.float32)
    x[0, 3], x[1, 40], x[2, 0], x[3, :32], x[4, :32], x[5, 0] = np.nan, np.inf, -np.inf, 0, -0.0, -np.nan
    x[6, ::2] *= -0.0
    for form in ("packed", "bf16", "e4m3", "e5m2"):
        assert_as_defined(jnp.asarray(x), Side(Operand(), form=form), Side(Operand(), Rotation(16), form))


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_nan_blocks_leave_their_neighbours_alone(dtype):
    x = np.array(draw_tensor(np.random.default_rng(6), (96, 96), "grid", dtype))
    x[::3, 40] = np.nan
    x[40, ::3] = np.nan
    assert_as_defined(jnp.asarray(x), Side(Operand()), Side(Operand()))
    assert_as_defined(jnp.asarray(x), None, Side(Operand()))


def test_blocks_that_fp8_cannot_hold_are_told():
    x = jnp.ones((2, 64)).at[0, :32].mul(2.0**-20).at[1, 32:].set(0)
    random = Random(reference=jnp.int32(127 - 2))
    for form, lost in (("e4m3", [[1, 0], [0, 0]]), ("e5m2", [[1, 0], [0, 0]])):
        rows, _ = quantize_operands(x, Side(Operand(), form=form), row_random=random)
        np.testing.assert_array_equal(rows.scales, lost)
        np.testing.assert_array_equal(np.asarray(rows.elements, np.float32)[:, 32:], [[4] * 32, [0] * 32])


# --- what nobody here wrote

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "golden" / "torchao_mx.npz")


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("rule", ["floor", "even", "rceil", "ceil"])
@pytest.mark.parametrize("section", ["gauss", "ties"])
def test_torchao(section, rule, dtype):
    """tests/golden/make_torchao.py says where torchao departs from the definition: here at scale byte 0."""
    x = GOLDEN[f"input/{dtype}/{section}"]
    x = jnp.asarray(x.view(np.float32 if dtype == "f32" else ml_dtypes.bfloat16))
    scales, codes = (GOLDEN[f"mxfp4/{dtype}/{rule}/{section}/{name}"] for name in ("scale", "codes"))
    side = Side(Operand(scale_rule=rule))
    rows, columns = quantize_operands(x, side)[0], quantize_operands(x.T, None, side)[1]
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
    rows, _ = quantize_operands(jnp.asarray(x), Side(Operand(scale_rule=rule)))
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
    halves = random_halves(counter, row, tl.load(key), tl.load(key + 1))
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
@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64])
def test_butterfly(size, group):
    x = jax.random.normal(jax.random.key(7), (8, 64))
    constants = {
        "SIZE": size,
        "GROUP": group,
        "GROUPS": 64 // group,
        "OTHER": 8,
        "FACTOR": float(np.float32(size**-0.5)),
    }
    [y] = triton_call(rotate_kernel, x, out=[jax.ShapeDtypeStruct(x.shape, x.dtype)], grid=(1,), **constants)
    np.testing.assert_array_equal(oracles.bits(y), oracles.bits(mxjax.rotate(x, size)))


# --- transformations

STOCHASTIC = Side(Operand(rounding="stochastic"), Rotation(16, "redrawn"))


def quantize_both(x, key):
    """Returns what the kernel makes of x: row-wise by nearest, column-wise with all that a key draws."""
    _, random = draw_side_random(key, STOCHASTIC)
    rows, columns = quantize_operands(x, Side(Operand()), STOCHASTIC, column_random=random)
    return (*rows, *columns)


def assert_each(got, x, keys):
    """Checks results with a leading axis against one call for each."""
    for i in range(len(got[0])):
        for a, b in zip(got, quantize_both(x[i], keys[i]), strict=True):
            np.testing.assert_array_equal(a[i], b)


X = np.asarray(jax.random.normal(jax.random.key(8), (3, 2, 33, 40)))
KEYS = jax.random.split(jax.random.key(9), 3)


def test_jit():
    for a, b in zip(jax.jit(quantize_both)(X[0], KEYS[0]), quantize_both(X[0], KEYS[0]), strict=True):
        np.testing.assert_array_equal(a, b)
    check(quantize_operands(jnp.asarray(X[0]), Side(Operand()))[0], Side(Operand()), *define_nearest(X[0]))


def define_nearest(x):
    return define(jnp.asarray(x), Side(Operand()), -1, None, None)


def test_vmap_over_tensor_and_key():
    assert_each(jax.vmap(quantize_both)(X, KEYS), X, KEYS)


def test_vmap_over_tensor():
    """With one key each tensor has the same random bits, as by `jax.vmap` of `mxjax.quantize`."""
    assert_each(jax.vmap(quantize_both, (0, None))(X, KEYS[0]), X, [KEYS[0]] * 3)


def test_vmap_over_key():
    assert_each(jax.vmap(quantize_both, (None, 0))(X[0], KEYS), [X[0]] * 3, KEYS)


def test_vmap_twice():
    grid = jax.vmap(jax.vmap(quantize_both, (None, 0)), (0, None))(X[:2, 0], KEYS)
    for i in range(2):
        assert_each([a[i] for a in grid], [X[i, 0]] * 3, KEYS)
    grid = jax.vmap(jax.vmap(quantize_both, (0, None)))(X, KEYS)
    for i in range(3):
        assert_each([a[i] for a in grid], X[i], [KEYS[i]] * 2)


def test_vmap_equals_vmap_of_the_definition():
    side = Side(Operand(rounding="stochastic"))

    def kernel(x, key):
        random = Random(jax.random.bits(key, (2,), jnp.uint32))
        return quantize_operands(x, side, row_random=random)[0].elements

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
    """CUDA runs 65535 programs along all axes but one."""
    side = Side(Operand())
    for rows, columns in ((side, None), (None, side), (side, side)):
        for shape in ((1, 1, 2**21, 64), (1, 1, 64, 2**21)):
            launch = kernel_sides.launch_of(rows, columns, Target("cuda", "sm_90"), shape, "bfloat16")
            assert max(launch.grid[1:]) <= MOST_PROGRAMS, (rows, columns, shape)


# --- what it refuses


@pytest.mark.parametrize(
    "operand", [Operand("mxfp8_e4m3"), Operand("nvfp4"), Operand(block_shape=16), Operand(block_shape=(1, 8))]
)
def test_refuses_other_formats_and_blocks(operand):
    with pytest.raises(NotImplementedError, match="mxfp4"):
        Side(operand)


def test_refuses_larger_rotations_and_longer_axes():
    with pytest.raises(NotImplementedError, match="H64"):
        Side(Operand(), Rotation(128))
    with pytest.raises(ValueError, match="shorter"):
        jax.eval_shape(
            lambda x: quantize_operands(x, Side(Operand())), jax.ShapeDtypeStruct((1, 2**24), jnp.bfloat16)
        )


def test_a_part_draws_the_bits_of_its_place_in_the_whole():
    whole = jax.random.normal(jax.random.key(0), (3, 256, 192))
    keys = [jax.random.key(i) for i in (1, 2)]
    sides = Side(Operand(rounding="stochastic")), Side(Operand(rounding="stochastic"), Rotation(16))
    words = [jax.random.bits(key, (2,), jnp.uint32) for key in keys]
    scalars = jnp.stack([*words[0], jnp.uint32(0), *words[1], jnp.uint32(0)])[None]
    b, r, c = slice(1, 3), slice(64, 192), slice(32, 160)
    places = [jnp.arange(s.start, s.stop, dtype=jnp.uint32) for s in (b, r, c)]
    part = whole[b, r, c][None]
    got = _call(*sides, current_target(), (256, 192), part, scalars, jnp.ones((1, 2, 64)), *places)
    for side, key, axis, (elements, scales) in zip(sides, keys, (-1, -2), (got[:2], got[2:]), strict=True):
        q = pack_by_definition(whole, Use(axis, side.operand, side.rotation, None, key))
        other, blocked = (r, c) if axis == -1 else (c, r)
        packed = q.elements[b, other, blocked.start // 2 : blocked.stop // 2]
        np.testing.assert_array_equal(_from_words(elements, "packed")[0], packed)
        np.testing.assert_array_equal(scales[0], q.scales[b, other, blocked.start // 32 : blocked.stop // 32])
