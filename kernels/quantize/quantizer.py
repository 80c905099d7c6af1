"""The quantizer kernels as JAX functions: tensors in, the K-major operands of one or two GEMMs out."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, Shaped, UInt32

from mxjax.kernels.launch import triton_call
from mxjax.kernels.lowering import TYPES
from mxjax.kernels.mesh import RuleAxes, batched_by_vmap, partitioned
from mxjax.kernels.quantize.draws import sign_words
from mxjax.kernels.quantize.kernel import Form, words_of
from mxjax.kernels.quantize.launches import (
    LONGEST_AXIS,
    ComputedKind,
    Launch,
    Pair,
    check_use,
    computed_launch_of,
    launch_of,
    launched_pairs,
)
from mxjax.numerics.formats import BLOCK
from mxjax.numerics.philox import key_words
from mxjax.operands.computed import Computed, GatedGradient, Normed
from mxjax.operands.kernel_operand import KernelOperand
from mxjax.operands.product import Product
from mxjax.operands.use import OperandUse
from mxjax.runtime.devices import Target, current_target

FORM_DTYPES: Mapping[Form, DTypeLike] = {"packed": jnp.uint8, "bf16": jnp.bfloat16}
"""The dtype of the elements in the kernel's 32-bit words."""


def quantize_operands(
    x: Float[Array, "*b r c"], uses: Sequence[OperandUse], form: Form = "packed"
) -> list[KernelOperand]:
    """Returns x quantized for each use, at most one for each of the last two axes.

    x is read once, or on CUDA in some cases twice (`launched_pairs`). Of two uses the second may read what
    the first left, where the kernel takes both (`mxjax.kernels.quantize.launches.takes_twice`).
    The bits are those that `mxjax.rotate` and `mxjax.quantize` define.

    Raises:
      NotImplementedError: a format or block shape that is not MXFP4's, or a rotation larger than H128.
      ValueError: r or c is 2**24 or more, or the tensor needs more programs than a grid of CUDA holds
        (`mxjax.kernels.quantize.launches.fit`).
    """
    batch, (r, c) = x.shape[:-2], x.shape[-2:]
    if max(r, c) >= LONGEST_AXIS:
        raise ValueError(
            f"quantize_operands needs axes shorter than {LONGEST_AXIS}, got {(r, c)}; split the tensor"
        )
    for use in uses:
        check_use(use)
    by_axis = {use.axis: use for use in uses}
    both = by_axis.get(-1), by_axis.get(-2)
    scalars = jnp.concatenate([scalars_of(use) for use in both])
    rows, columns = (use and use.options for use in both)
    if rows and columns and both[1] and both[1].reads is not None:
        columns = columns._replace(reads=rows)
    run = _quantizer((rows, columns), form, current_target())
    x = x if x.dtype.name in TYPES else x.astype(jnp.float32)  # float64, as the definition does
    flat = run(x.reshape(1, math.prod(batch), r, c), scalars[None])
    made = {}
    for axis, use, other in ((-1, rows, r), (-2, columns, c)):
        if use is None:
            continue
        words, scales = flat.pop(0), flat.pop(0)
        elements = elements_of(words, form)
        elements = elements.reshape(*batch, other, elements.shape[-1])
        scales = scales.reshape(*batch, other, use.padded(x.shape[axis]) // BLOCK)
        made[axis] = KernelOperand(elements, scales if form == "packed" else None, use.operand.prescale)
    return [made[use.axis] for use in uses]


def scalars_of(use: OperandUse | None) -> UInt32[Array, "6"]:
    """Returns two words of a use's key and four of its signs; any where the kernel reads none."""
    if use is None:
        return jnp.zeros(6, jnp.uint32)
    if use.words is not None:
        redrawn = use.rotation is not None and use.rotation.signs == "redrawn"
        if redrawn or use.signs is None:
            return use.words
        return jnp.append(use.words[:2], sign_words(use.signs))
    stochastic = use.key is not None and use.operand.rounding == "stochastic"
    key = key_words(use.key) if stochastic else jnp.zeros(2, jnp.uint32)
    return jnp.append(key, jnp.zeros(4, jnp.uint32) if use.signs is None else sign_words(use.signs))


def elements_of(words: Int32[Array, "*b n words"], form: Form) -> Shaped[Array, "*b n _"]:
    """Returns the elements in 32-bit words; only the type changes."""
    elements = lax.bitcast_convert_type(words, FORM_DTYPES[form])
    return elements.reshape(*words.shape[:-1], words.shape[-1] * 4 // jnp.dtype(FORM_DTYPES[form]).itemsize)


@functools.cache
def _quantizer(pair: Pair, form: Form, target: Target | None):
    """Returns a function of x [v, b, r, c] and keys and signs as scalars [v or 1, 12]; vmap grows v.

    A mesh may shard it along all axes of x, but not within blocks or rotations.
    """

    def run(x, scalars):
        places = [jnp.arange(n, dtype=jnp.uint32) for n in x.shape[1:]]  # of which a shard reads its offsets
        *_, r, c = x.shape
        call = functools.partial(launch_pair, pair, form, target, (r, c))
        return partitioned(call, *_sharding_of(pair, form, r, c, scalars.shape[0]))(x, scalars, *places)

    return batched_by_vmap(run, shared=1)


def _sharding_of(pair: Pair, form: Form, r: int, c: int, scalars: int):
    """Returns the rule, sizes and whole factors of `partitioned` for a tensor [v, b, r, c]."""
    rows, columns = pair
    axes = RuleAxes("scalars")
    r_axis = axes.compound("r", r, _unit(columns, rows))
    c_axis = axes.compound("c", c, _unit(rows, columns))
    of_scalars = f"{'v' if scalars > 1 else 'one'} scalars"
    results = []
    for use, other, name in ((rows, r_axis, "c"), (columns, c_axis, "r")):
        if use is None:
            continue
        for what, each in (("words", 8 // words_of(form)), ("scales", BLOCK)):
            results.append(f"v b {other} {axes.along(name, what, each)}")
    rule = f"v b {r_axis} {c_axis}, {of_scalars}, b, {r_axis}, {c_axis} -> {', '.join(results)}"
    return rule, axes.sizes, axes.whole


def _unit(blocked: OperandUse | None, other: OperandUse | None) -> int:
    """Returns the size that divides every shard of an axis; `blocked` is the use with blocks along it."""
    unit = blocked.padded(1) if blocked else 1
    return max(unit, BLOCK) if other and other.operand.is_square else unit


def launch_pair(
    pair: Pair, form: Form, target: Target | None, whole: tuple[int, int], x, scalars, *places
) -> list[jax.Array]:
    """Runs the kernel on x, which lies at `places` in a tensor of `whole` rows and columns."""
    results: list[jax.Array] = []
    for rows, columns in launched_pairs(pair, target):
        wanted = (rows, rows, columns, columns)
        launch = launch_of((rows, columns), form, target, x.shape, x.dtype, whole)
        reads = any(map(reads_scalars, wanted))
        read, stride = placed_scalars(reads, x, scalars, places)
        written = run_launch(launch, x, read, **stride)
        results += [y for y, use in zip(written, wanted, strict=True) if use]
    return results


def run_launch(launch: Launch, *arrays: jax.Array, **more: Any) -> list[jax.Array]:
    """Runs a launch on its arrays, with more constants if any."""
    constants = launch.constants | more
    return triton_call(
        launch.kernel, *arrays, out=launch.out, grid=launch.grid, num_warps=launch.num_warps, **constants
    )


def placed_scalars(reads: bool, x, scalars, places) -> tuple[jax.Array, dict[str, int]]:
    """Returns the scalars with x's offsets, the first of its batches, rows and columns, and their stride.

    x stands in for scalars that the kernel does not read, because making that array would be another kernel.
    """
    if not reads:
        return x, {"SCALARS_STRIDE": 0}
    place = jnp.stack([axis[0] if axis.size else jnp.uint32(0) for axis in places])
    scalars = jnp.concatenate([scalars, jnp.broadcast_to(place, (scalars.shape[0], 3))], axis=1)
    return scalars, {"SCALARS_STRIDE": scalars.shape[1] if scalars.shape[0] > 1 else 0}


def quantize_computed(x: Computed, rows: OperandUse, columns: OperandUse) -> list[KernelOperand]:
    """Returns the values of x, rounded to bfloat16, packed for both uses.

    Values differ from XLA's (`x.value`) by a unit in the last place of bfloat16 at most, unless a product
    on the way overflows or is subnormal: the logistic function of a gate below -87 counts as zero, and
    it is applied first. A block whose values have NaN or infinity is NaN.

    Args:
      x: made of tensors in bfloat16; products may have factors or not.
      rows, columns: uses that `takes_computed` accepts, along -1 and -2; columns may read what rows left.
    Raises:
      TypeError: a tensor in another dtype.
    """
    kind, arrays = arrays_of(x, _with_factors)
    for array in arrays[::3]:
        if array.dtype != jnp.bfloat16:
            raise TypeError(f"quantize_computed needs tensors in bfloat16, got {array.dtype}")
    *batch, r, n = arrays[0].shape
    n = n // 2 if kind == "gated" else n
    v = math.prod(batch)
    reads = rows.options if columns.reads else None
    run = _computed_quantizer((rows.options, columns.options._replace(reads=reads)), kind)
    drawn = reads_scalars(columns)
    if drawn and batch:
        raise ValueError(f"quantize_computed draws for a matrix alone, got {arrays[0].shape}")
    scalars = [jnp.concatenate([scalars_of(rows), scalars_of(columns)])[None]] if drawn else []
    made = run(*(a.reshape(v, *a.shape[len(batch) :]) for a in arrays), *scalars)
    return [
        KernelOperand(
            elements_of(words, "packed").reshape(*batch, other, -1), scales.reshape(*batch, other, -1)
        )
        for words, scales, other in ((*made[:2], r), (*made[2:], n))
    ]


def arrays_of(
    x: Computed, with_factors: Callable[[Product], Sequence[jax.Array]]
) -> tuple[ComputedKind, list[jax.Array]]:
    """Returns x's kind and arrays: a tensor with the factors of its rows and columns, or its products."""
    if isinstance(x, Normed):
        scale = jnp.broadcast_to(x.scale.astype(x.x.dtype), (*x.x.shape[:-2], x.x.shape[-1]))
        return "normed", [x.x, x.factors, scale]
    arrays = [array for product in x for array in with_factors(product)]
    return "gradient" if isinstance(x, GatedGradient) else "gated", arrays


def _with_factors(product: Product) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns a product, and the factors of its rows and its columns, all with batch axes."""
    *batch, r, n = product.raw.shape
    rows, columns = product.factors or (jnp.ones((*batch, m), jnp.float32) for m in (r, n))
    return product.raw, rows, columns


@functools.cache
def _computed_quantizer(pair: Pair, kind: ComputedKind):
    """Returns a function of tensors [v, r, n], each followed by arrays [v, r] and [v, n]; vmap grows v.

    Keys and signs as scalars, [v or 1, 12], come last if columns read them. A mesh may shard it along rows,
    but not within blocks or rotations.
    """

    def run(*arrays):
        call = functools.partial(launch_computed, pair, kind)
        r, scalars = arrays[0].shape[1], [x.shape[0] for x in arrays[_ARRAYS[kind] :]]
        places = [jnp.arange(r, dtype=jnp.uint32) for _ in scalars]  # of which a shard reads its offset
        return partitioned(call, *_computed_sharding_of(pair, kind, r, scalars))(*arrays, *places)

    return batched_by_vmap(run, shared=_ARRAYS[kind])


_COLUMNS: dict[ComputedKind, tuple[str, ...]] = {
    "normed": ("c",),
    "gated": ("two_c",),
    "gradient": ("two_c", "c"),
}
"""The columns of each tensor."""
_ARRAYS: dict[ComputedKind, int] = {kind: 3 * len(columns) for kind, columns in _COLUMNS.items()}
"""The arrays of each kind, without scalars."""


def _computed_sharding_of(pair: Pair, kind: ComputedKind, r: int, scalars: list[int]):
    """Returns the rule, sizes and whole factors of `partitioned` for tensors with r rows.

    Args:
      scalars: the length of the scalars' first axis, if there are any.
    """
    _, columns = pair
    assert columns is not None
    tensors, other = _COLUMNS[kind], "two_c" if kind == "gradient" else "c"
    axes = RuleAxes(*tensors, "row_words", "row_scales", other, *("scalars" for _ in scalars))
    r_axis = axes.compound("r", r, columns.padded(1))
    arguments = [term for n in tensors for term in (f"v {r_axis} {n}", f"v {r_axis}", f"v {n}")]
    arguments += [term for n in scalars for term in (f"{'v' if n > 1 else 'one'} scalars", r_axis)]
    results = [f"v {r_axis} row_words", f"v {r_axis} row_scales"]
    results += [f"v {other} {axes.along('r', *each)}" for each in (("words", 8), ("scales", BLOCK))]
    return ", ".join(arguments) + " -> " + ", ".join(results), axes.sizes, axes.whole


def launch_computed(pair: Pair, kind: ComputedKind, *arrays: jax.Array) -> list[jax.Array]:
    """Runs the kernel on the arrays of a kind, then scalars and places of rows if columns read those."""
    v, r, n = arrays[0].shape
    launch = computed_launch_of(pair, kind, (v, r, n if kind == "normed" else n // 2))
    given, drawn = arrays[: _ARRAYS[kind]], arrays[_ARRAYS[kind] :]
    origin = jnp.zeros(1, jnp.uint32)
    scalars, place = drawn or (arrays[0], origin)
    read, stride = placed_scalars(bool(drawn), arrays[0], scalars, (origin, place, origin))
    _, columns = pair
    assert columns is not None
    options = {"STOCHASTIC": columns.operand.rounding == "stochastic", "SIGNS": columns.has_signs}
    return run_launch(launch, *given, read, **stride, **options)


def reads_scalars(use: OperandUse | None) -> bool:
    """Whether kernels read a key or signs for a use."""
    return use is not None and (use.operand.rounding == "stochastic" or use.has_signs)
