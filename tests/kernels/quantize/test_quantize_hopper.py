"""Hopper's quantizer kernel against the definitions, bit for bit; its inline assembly is run by `ptx`."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.marks import parametrize
from support.quantizer import assert_as_defined, draw_tensor

from mxjax.kernels.quantize import quantizer
from mxjax.kernels.quantize.hopper import quantize_pairs_kernel
from mxjax.kernels.quantize.kernel import quantize_kernel
from mxjax.kernels.quantize.launches import launch_of, launched_pairs
from mxjax.kernels.quantize.quantizer import launch_pair, quantize_operands
from mxjax.numerics.operand import Operand
from mxjax.numerics.philox import key_words
from mxjax.operands.kernel_operand import pack_by_definition
from mxjax.operands.use import OperandUse, dequantize_use
from mxjax.policy import Rotation
from mxjax.products.prepare import prepare
from mxjax.runtime.devices import INTERPRETER, Target

ROWS, PLAIN = OperandUse(-1), OperandUse(-2)
H16, ROWS_H16 = (OperandUse(axis, rotation=Rotation(16)) for axis in (-2, -1))
ROWS_DRAWN, DRAWN = (
    OperandUse(axis, Operand(rounding="stochastic"), key=jax.random.key(3 - axis)) for axis in (-1, -2)
)
SIGNED = OperandUse(-2, rotation=Rotation(16, signs="redrawn"))
EVEN_H16 = OperandUse(-2, Operand(scale_rule="even"), Rotation(16))
COLUMNS = [PLAIN, OperandUse(-2, Operand(block_shape=32), Rotation(4)), H16, SIGNED, EVEN_H16, DRAWN]
KEYS = jax.random.split(jax.random.key(4), 2)
HOPPER = Target("cuda", "sm_90")
ELSEWHERE = [INTERPRETER, Target("cuda", "sm_89"), Target("cuda", "sm_100"), Target("hip", "gfx950")]


pytestmark = pytest.mark.usefixtures("on_hopper")


def kernel_of(rows, columns, shape, dtype="bfloat16", target=HOPPER, form="packed"):
    return launch_of((rows, columns), form, target, (1, 1, *shape), dtype).kernel


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("rows", [None, ROWS, ROWS_DRAWN])
@pytest.mark.parametrize("kind", ["special", "grid"])
def test_as_defined(rows, columns, kind):
    """Edges on both axes: rows end within a group, a block and a tile, columns within a block and a tile."""
    general = rows is ROWS_DRAWN and columns.rotation
    *apart, last = launched_pairs((rows, columns), HOPPER)
    assert kernel_of(*last, (37, 136)) is (quantize_kernel if general else quantize_pairs_kernel)
    assert apart == ([(ROWS_DRAWN, None)] if rows is ROWS_DRAWN and not general else [])
    assert_as_defined(
        draw_tensor(np.random.default_rng(0), (37, 136), kind, "bfloat16"),
        *(use for use in (rows, columns) if use),
    )


@parametrize("shape", (2, 1, 8), slow=[(128, 256), (3, 200, 48)])
def test_shapes(shape):
    x = draw_tensor(np.random.default_rng(1), shape, "wide", "bfloat16")
    assert_as_defined(x, ROWS, H16)
    assert_as_defined(x, ROWS_DRAWN, DRAWN)


def test_elements_that_the_rule_quest_clips():
    x = draw_tensor(np.random.default_rng(2), (37, 136), "special", "bfloat16")
    quest = Operand(scale_rule="quest", rounding="stochastic", prescale=0.75)
    assert_as_defined(x, OperandUse(-1, quest, key=jax.random.key(2)))


@pytest.mark.parametrize("exponent", [-112, 113, 118, 124])
@pytest.mark.parametrize("columns", COLUMNS)
def test_magnitudes_at_both_ends(columns, exponent):
    """Short of subnormal sums, which XLA flushes; with 124 some rotated elements overflow."""
    x = np.random.default_rng(4).standard_normal((64, 64)) * 2.0**exponent
    assert_as_defined(jnp.asarray(x, jnp.bfloat16), ROWS, columns)


def test_two_launches_for_stochastic_inputs_or_h128_of_columns():
    stochastic = Operand(rounding="stochastic")
    rows, columns = (OperandUse(axis, stochastic, key=jax.random.key(3)) for axis in (-1, -2))
    rotated = OperandUse(-2, stochastic, Rotation(16), key=jax.random.key(3))
    assert launched_pairs((rows, columns), HOPPER) == [(rows, None), (None, columns)]
    assert kernel_of(None, columns, (40, 72)) is quantize_pairs_kernel
    assert launched_pairs((rows, rotated), HOPPER) == [(rows, None), (None, rotated)]
    assert launched_pairs((rows, PLAIN), HOPPER) == [(rows, None), (None, PLAIN)]
    assert launched_pairs((rows, H16), HOPPER) == [(rows, H16)]
    assert launched_pairs((ROWS, columns), HOPPER) == [(ROWS, columns)]
    h128 = OperandUse(-2, rotation=Rotation(128))
    assert launched_pairs((ROWS, h128), HOPPER) == [(ROWS, None), (None, h128)]
    assert launched_pairs((rows, rotated), Target("hip", "gfx950")) == [(rows, rotated)]
    x = draw_tensor(np.random.default_rng(6), (40, 72), "normal", "bfloat16")
    assert_as_defined(x, rows, columns)
    assert_as_defined(x, rows, rotated)


@pytest.mark.parametrize("rule", ["floor", "even", "rceil"])
def test_the_general_kernel_rounds_two_elements_at_a_time(rule):
    inputs = [OperandUse(axis, Operand(scale_rule=rule)) for axis in (-1, -2)]
    assert kernel_of(*inputs, (37, 60)) is quantize_kernel
    for kind in ("special", "grid"):
        assert_as_defined(draw_tensor(np.random.default_rng(2), (37, 60), kind, "bfloat16"), *inputs)


@pytest.mark.parametrize("prescale", [0.75, 0.7])
@pytest.mark.parametrize("form", ["packed", "bf16"])
@pytest.mark.parametrize("axis", [-1, -2])
def test_stochastic_rounding(axis, form, prescale):
    """A factor that is absorbed by the scale's exactly, and one that is not; the words of Philox alone."""
    use = OperandUse(axis, Operand(rounding="stochastic", prescale=prescale), Rotation(64, signs="redrawn"))
    x = draw_tensor(np.random.default_rng(8), (9, 130) if axis == -1 else (130, 9), "wide", "bfloat16")
    assert_as_defined(x, use, form=form)


def seen(rule, other, rotation=None):
    """Returns uses for a tensor: the second reads what the first left, as TetraJet's, or rotates that."""
    rows = OperandUse(-1, Operand(scale_rule=rule), form="packed")
    columns, key = Operand(scale_rule=other, source="dequantized"), None
    if rotation is None:
        columns, key = dataclasses.replace(columns, rounding="stochastic"), jax.random.key(5)
    return rows, OperandUse(-2, columns, rotation, key=key, form="packed", reads=rows)


def assert_quantized_twice(x, rows, columns):
    @jax.jit
    def defined(x):
        return pack_by_definition(x, rows), pack_by_definition(dequantize_use(x, rows), columns)

    for got, wanted in zip(prepare(x, [rows, columns]), defined(x), strict=True):
        for name in ("elements", "scales"):
            np.testing.assert_array_equal(getattr(got, name), getattr(wanted, name))


@pytest.mark.parametrize(
    ("rule", "other", "kind", "rotation"),
    [
        ("rceil", "rceil", "normal", None),
        ("even", "floor", "special", None),
        ("ceil", "uos", "grid", None),
        ("rceil", "even", "special", Rotation(16)),
    ],
)
def test_one_read_for_columns_of_what_the_rows_left(rule, other, kind, rotation, monkeypatch):
    reads = mock.Mock(wraps=quantize_operands)
    monkeypatch.setattr(quantizer, "quantize_operands", reads)
    shape = (37, 136) if kind != "grid" else (2, 33, 264)
    x = draw_tensor(np.random.default_rng(11), shape, kind, "bfloat16")
    uses = seen(rule, other, rotation)
    assert_quantized_twice(x, *uses)
    assert reads.call_count == 1
    rows, columns = (use.options for use in uses)
    assert kernel_of(rows, columns._replace(reads=rows), (37, 136)) is quantize_pairs_kernel


@pytest.mark.slow
def test_all_bit_patterns_quantized_twice():
    """Sorted: subnormals and the largest, whose quantized values are infinite, among them."""
    x = jnp.asarray(np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(512, 128))
    for tensor in (x, x.T):
        assert_quantized_twice(tensor, *seen("rceil", "rceil"))


@pytest.mark.parametrize("rule", ["even", "uos", "rceil", "ceil"])
@pytest.mark.parametrize("columns", [PLAIN, DRAWN])
def test_any_rule(rule, columns):
    rows = OperandUse(-1, Operand(scale_rule=rule))
    columns = columns._replace(operand=dataclasses.replace(columns.operand, scale_rule=rule))
    assert kernel_of(rows, columns, (37, 136)) is quantize_pairs_kernel
    for kind in ("wide", "special", "grid"):
        assert_as_defined(draw_tensor(np.random.default_rng(12), (37, 136), kind, "bfloat16"), rows, columns)


def test_a_part_draws_the_bits_of_its_place():
    x = draw_tensor(np.random.default_rng(9), (3, 128, 96), "normal", "bfloat16")
    whole = quantize_operands(x, [ROWS_DRAWN, DRAWN])
    words = [np.asarray(key_words(use.key)) for use in (ROWS_DRAWN, DRAWN)]
    scalars = jnp.asarray(np.concatenate([np.append(w, np.zeros(4, np.uint32)) for w in words]))[None]
    places = [jnp.arange(first, 128, dtype=jnp.uint32) for first in (1, 64, 32)]
    part = x[None, 1:, 64:, 32:]
    pair = ROWS_DRAWN.options, DRAWN.options
    row_words, row_scales, column_words, column_scales = launch_pair(
        pair, "packed", HOPPER, (128, 96), part, scalars, *places
    )
    for words, scales, y, rows, columns in (
        (row_words, row_scales, whole[0], slice(64, None), slice(32 // 8, None)),
        (column_words, column_scales, whole[1], slice(32, None), slice(64 // 8, None)),
    ):
        expected = np.asarray(y.elements).view(np.int32)
        np.testing.assert_array_equal(words[0], expected[1:, rows, columns])
        np.testing.assert_array_equal(scales[0], np.asarray(y.scales)[1:, rows, columns.start // 4 :])


@parametrize("pair", (ROWS, H16), slow=[(ROWS_DRAWN, DRAWN)], ids=["nearest", "drawn"])
def test_vmap(pair):
    """Of a tensor and a key, or of keys alone."""
    xs, keys = draw_tensor(np.random.default_rng(5), (2, 3, 48, 40), "normal", "bfloat16"), KEYS

    def quantize(x, key):
        return quantize_operands(x, [use._replace(key=key if use.key is not None else None) for use in pair])

    drawn = pair[0] is ROWS_DRAWN
    got = jax.vmap(quantize, (None if drawn else 0, 0))(xs[0] if drawn else xs, keys)
    for i, key in enumerate(keys):
        wanted = quantize(xs[0] if drawn else xs[i], key)
        for y, z in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(y[i], z)


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (2, 0, 64), (0, 8, 64)])
def test_nothing_to_quantize(shape):
    rows, columns = quantize_operands(jnp.zeros(shape, jnp.bfloat16), [ROWS, H16])
    *batch, r, c = shape
    length = H16.padded(r)
    assert [a.shape for a in jax.tree.leaves(rows)] == [(*batch, r, c // 2), (*batch, r, c // 32)]
    assert [a.shape for a in jax.tree.leaves(columns)] == [
        (*batch, c, length // 2),
        (*batch, c, length // 32),
    ]


@parametrize("order", slow=["sorted"], exhaustive=["shuffled"])
def test_all_bit_patterns(order):
    """Sorted, each is among the largest of its blocks; shuffled, it is beside any other finite one."""
    patterns = np.arange(2**16, dtype=np.uint16)
    if order == "shuffled":
        finite = patterns[np.isfinite(patterns.view(ml_dtypes.bfloat16).astype(np.float32))]
        patterns = np.resize(np.random.default_rng(3).permutation(finite), 2**16)
    x = jnp.asarray(patterns.view(ml_dtypes.bfloat16).reshape(512, 128))
    for tensor in (x, x.T):
        assert_as_defined(tensor, ROWS, PLAIN)
        assert_as_defined(tensor, ROWS_DRAWN, DRAWN)


def test_what_it_does_not_take_goes_to_the_general_kernel():
    taken = {kernel_of(ROWS, columns, (64, 64)) for columns in (H16, SIGNED)}
    others = [
        kernel_of(ROWS, PLAIN, (64, 60)),
        kernel_of(ROWS, PLAIN, (64, 64), "float32"),
        kernel_of(ROWS, PLAIN, (64, 64), "float16"),
        kernel_of(ROWS, None, (64, 64)),
        kernel_of(ROWS_H16, H16, (64, 64)),
        kernel_of(ROWS_H16, PLAIN, (64, 64)),
        *(kernel_of(None, OperandUse(-2, rotation=Rotation(size)), (64, 64)) for size in (2, 8, 32, 64, 128)),
        *(kernel_of(ROWS, PLAIN, (64, 64), target=target) for target in ELSEWHERE),
        kernel_of(ROWS, OperandUse(-2, Operand(rounding="stochastic"), Rotation(16)), (64, 64)),
        kernel_of(ROWS_DRAWN, H16, (64, 64)),
        kernel_of(ROWS, OperandUse(-2, Operand(scale_rule="rceil"), Rotation(16)), (64, 64)),
        *(
            kernel_of(ROWS, OperandUse(-2, Operand(**options)), (64, 64))
            for options in ({"prescale": 0.75}, {"block_shape": (32, 32)})
        ),
        kernel_of(ROWS, PLAIN, (64, 64), form="bf16"),
    ]
    assert taken == {quantize_pairs_kernel}
    assert quantize_pairs_kernel not in others
