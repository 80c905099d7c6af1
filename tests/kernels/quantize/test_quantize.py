"""The quantizer kernel against the definitions in `mxjax`, bit for bit."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.marks import parametrize
from support.quantizer import DTYPES, assert_as_defined, draw_tensor

from mxjax.kernels.quantize import launches, quantizer
from mxjax.numerics.operand import Operand
from mxjax.operands.product import Product
from mxjax.operands.use import OperandUse
from mxjax.policy import Rotation
from mxjax.products.gradients import gradient_by_definition, through_quantization
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

NVIDIA = Target("cuda", "sm_90")
ROWS, COLUMNS, ROWS_H16 = OperandUse(-1), OperandUse(-2), OperandUse(-1, rotation=Rotation(16))
COLUMNS_H16 = OperandUse(-2, rotation=Rotation(16))
COLUMNS_H64 = OperandUse(-2, rotation=Rotation(64, "redrawn"))
ROWS_H128 = OperandUse(-1, Operand(block_shape=(32, 32)), Rotation(128, "fixed"))
COLUMNS_H128 = OperandUse(-2, Operand(rounding="stochastic", prescale=0.75), Rotation(128, "redrawn"))
SQUARE_ROWS = OperandUse(-1, Operand(block_shape=(32, 32)))
SQUARE_COLUMNS_H128 = OperandUse(-2, Operand(block_shape=(32, 32)), Rotation(128))


@contextlib.contextmanager
def tiles_of(target):
    """Makes the kernel take a target's tiles, if any, in the interpreter too; NVIDIA's have groups of 32."""
    tile = launches._tile
    with pytest.MonkeyPatch.context() as patch:
        if target:
            patch.setattr(launches, "_tile", lambda _, *args: tile(target, *args))
        quantizer._quantizer.cache_clear()
        yield
    quantizer._quantizer.cache_clear()


def with_any_options(max_examples, *examples, tiles=None):
    """Returns a test of so many examples, and of these."""

    def check(shape, kind, dtype, inputs, form, seed):
        x = draw_tensor(np.random.default_rng(seed), shape, kind, dtype)
        with tiles_of(tiles):
            assert_as_defined(x, *inputs, form=form, seed=seed)

    for case in examples:
        check = example(*case)(check)
    return settings(max_examples=max_examples)(given(*tensors, wanted, forms, st.integers(0, 2**16))(check))


LONG = [
    ((130, 140), "wide", "bfloat16", (ROWS_H128, COLUMNS_H128), "packed", 0),
    ((33, 65), "special", "float32", (ROWS, COLUMNS_H128), "bf16", 0),
]
test_any_options = pytest.mark.slow(
    with_any_options(
        8,
        ((1, 1), "normal", "bfloat16", (ROWS, COLUMNS), "packed", 0),
        ((2, 1, 33), "normal", "float32", (ROWS, COLUMNS_H16), "packed", 0),
    )
)
test_nvidia_tiles = pytest.mark.slow(
    with_any_options(
        2,
        ((2, 33, 70), "normal", "float32", (ROWS, COLUMNS_H64), "packed", 0),
        ((17, 600), "wide", "bfloat16", (ROWS_H16,), "packed", 0),
        ((5, 1100), "wide", "bfloat16", (ROWS_H16,), "packed", 0),
        ((33, 70), "normal", "bfloat16", (SQUARE_ROWS,), "packed", 0),
        ((33, 40), "normal", "bfloat16", (SQUARE_COLUMNS_H128,), "packed", 0),
        tiles=NVIDIA,
    )
)
test_any_options_at_length = pytest.mark.exhaustive(with_any_options(50, *LONG))
test_nvidia_tiles_at_length = pytest.mark.exhaustive(with_any_options(30, *LONG, tiles=NVIDIA))


@parametrize(
    ("rule", "form", "rounding"),
    *((rule, "packed", "nearest") for rule in RULES),
    *(("floor", form, "stochastic") for form in ("packed", "bf16")),
    slow=[("even", "bf16", "nearest")],
    exhaustive=[(rule, "bf16", "nearest") for rule in RULES if rule != "even"],
)
def test_rules_and_roundings(rule, form, rounding):
    x = draw_tensor(np.random.default_rng(0), (64, 64), "wide", "bfloat16")
    plain, prescaled = (Operand(scale_rule=rule, rounding=rounding, prescale=p) for p in (None, 0.75))
    assert_as_defined(x, OperandUse(-1, plain), OperandUse(-2, prescaled), form=form)


@parametrize(
    ("size", "signs"),
    *((16, "none"), *((size, "redrawn") for size in (2, 4, 8, 16, 32, 128))),
    exhaustive=[(64, "none"), (64, "redrawn"), (128, "none")],
)
def test_rotations(size, signs):
    x = draw_tensor(np.random.default_rng(1), (40, 100), "normal", "bfloat16")
    rotation = Rotation(size, signs)
    for form in ("packed", "bf16"):
        assert_as_defined(x, *(OperandUse(axis, rotation=rotation) for axis in (-1, -2)), form=form)


def test_square_blocks():
    x = draw_tensor(np.random.default_rng(2), (2, 70, 90), "wide", "float32")
    square = Operand(block_shape=(32, 32), scale_rule="even")
    assert_as_defined(x, OperandUse(-1, square), OperandUse(-2, square))


@parametrize(
    ("dtype", "order"),
    *(("bfloat16", "sorted"), ("float16", "shuffled")),
    exhaustive=[("bfloat16", "shuffled"), ("float16", "sorted")],
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


# --- the rule `quest`, and gradients through a quantization that clips


@pytest.mark.parametrize("tiles", [None, NVIDIA], ids=["own", "nvidia"])
def test_quest(tiles):
    x = np.array(draw_tensor(np.random.default_rng(2), (70, 100), "special", "bfloat16"))
    x[:, 32:64] = x[:, 32:33]  # their deviation is zero
    x[40:48] *= 2.0**120  # their sums of squares overflow
    x, quest = jnp.asarray(x), Operand(scale_rule="quest")
    drawn = Operand(scale_rule="quest", rounding="stochastic", prescale=0.75)
    for form in ("packed", "bf16"):
        with tiles_of(tiles):
            assert_as_defined(x, OperandUse(-1, quest), OperandUse(-2, quest), form=form)
            assert_as_defined(x, OperandUse(-1, quest, Rotation(32)), form=form)
            assert_as_defined(x, OperandUse(-1, drawn), OperandUse(-2, quest, Rotation(16)), form=form)


@pytest.mark.parametrize(
    ("axis", "shape", "size", "rule", "dtype", "scaled"),
    [
        (-1, (2, 9, 544), 32, "quest", "bfloat16", True),
        (-1, (8, 512), 32, "quest", "float32", False),
        (-1, (33, 512), None, "even", "bfloat16", True),
        (-2, (2, 96, 70), 32, "quest", "float32", False),
        (-2, (64, 64), 16, "quest", "bfloat16", True),
        (-2, (64, 70), None, "even", "float32", False),
    ],
)
def test_clipped_gradients(axis, shape, size, rule, dtype, scaled):
    rng, seen = np.random.default_rng(0), Operand(source="dequantized")
    x = draw_tensor(rng, shape, "special", "bfloat16")
    raw = draw_tensor(rng, shape, "normal", "float32")
    factors = tuple(
        jnp.exp2(jnp.asarray(rng.integers(-9, 9, (*shape[:-2], n)), jnp.float32)) for n in shape[-2:]
    )
    use = OperandUse(axis, Operand(scale_rule=rule, gradient="clipped"), Rotation(size) if size else None)

    product = Product(raw, factors) if scaled else Product(raw)
    found = jax.jit(lambda p, x: through_quantization(p, x, use, seen, jnp.dtype(dtype)))(product, x)
    with jax.default_device(jax.devices("cpu")[0]):
        product, on_cpu = jax.tree.map(jnp.asarray, jax.device_get((product, x)))
        expected = jax.jit(lambda g, x: gradient_by_definition(g, x, use, seen).astype(dtype))
        expected = expected(product.value(jnp.float32), on_cpu)
    assert found.dtype == expected.dtype == dtype
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))
    assert size or 0.001 < np.mean(np.asarray(found) == 0) < 0.6
