"""The quantizer kernel as a JAX function: one tensor in, the K-major operands of one or two GEMMs out."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Shaped, UInt8

from mxjax.kernels.launch import Target, current_target, triton_call
from mxjax.kernels.mesh import along, compound, partitioned
from mxjax.kernels.quantize.kernel import SCALARS, quantize_kernel
from mxjax.kernels.quantize.launch_plan import BLOCK, LARGEST_ROTATION, WORDS, Form, Side, launch_of

LONGEST = 2**24
DTYPES = {"packed": jnp.uint8, "e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2, "bf16": jnp.bfloat16}


class Quantized(NamedTuple):
    """What the kernel writes of one side: K-major, other axis first.

    Attributes:
      elements: [*b, other, length / 2] uint8 if packed, else [*b, other, length].
      scales: [*b, other, length / 32], E8M0 bytes; for FP8 forms 1 where a block does not fit, else 0.
    """

    elements: Shaped[Array, "*b other _"]
    scales: UInt8[Array, "*b other _"]


class Random(NamedTuple):
    """What one side draws or is given: key words, signs, and the reference of an FP8 form."""

    key: Shaped[Array, "2"] | None = None
    signs: Float32[Array, " size"] | None = None
    reference: Int32[Array, ""] | None = None


NOTHING_RANDOM = Random()


def quantize_operands(
    x: Float[Array, "*b r c"],
    rows: Side | None = None,
    columns: Side | None = None,
    *,
    row_random: Random = NOTHING_RANDOM,
    column_random: Random = NOTHING_RANDOM,
) -> tuple[Quantized | None, Quantized | None]:
    """Returns x quantized along its last axis (rows), along the last but one (columns, transposed), or both.

    Element for element what `mxjax.rotate` and `mxjax.quantize` define, in one read of x.

    Raises:
      ValueError: r or c is 2**24 or more.
    """
    batch, (r, c) = x.shape[:-2], x.shape[-2:]
    if max(r, c) >= LONGEST:
        raise ValueError(f"axes must be shorter than {LONGEST}, for 32-bit offsets within a tile: {(r, c)}")
    scalars = jnp.stack([*_scalars(row_random), *_scalars(column_random)])
    signs = jnp.stack([_signs(row_random), _signs(column_random)])
    run = _quantizer(rows, columns, current_target())
    flat = run(x.reshape(1, math.prod(batch), r, c), scalars[None], signs[None])
    results: list[Quantized | None] = []
    for side, length, other in ((rows, c, r), (columns, r, c)):
        if side is None:
            results.append(None)
            continue
        words, scales = flat.pop(0), flat.pop(0)
        elements = _from_words(words, side.form)
        elements = elements.reshape(*batch, other, elements.shape[-1])
        results.append(Quantized(elements, scales.reshape(*batch, other, side.length(length) // BLOCK)))
    return results[0], results[1]


def _scalars(random: Random) -> list[jax.Array]:
    key = jnp.zeros(2, jnp.uint32) if random.key is None else random.key
    reference = jnp.int32(0) if random.reference is None else random.reference
    return [key[0], key[1], lax.bitcast_convert_type(reference, jnp.uint32)]


def _signs(random: Random) -> Float32[Array, "64"]:
    if random.signs is None:
        return jnp.ones(LARGEST_ROTATION, jnp.float32)
    return jnp.tile(random.signs, LARGEST_ROTATION // random.signs.size)


def _from_words(words: Int32[Array, "*b n words"], form: Form) -> Shaped[Array, "*b n _"]:
    """Returns the elements in 32-bit words, which is a matter of types alone."""
    elements = lax.bitcast_convert_type(words, DTYPES[form])
    return elements.reshape(*words.shape[:-1], words.shape[-1] * 4 // jnp.dtype(DTYPES[form]).itemsize)


@functools.cache
def _quantizer(rows: Side | None, columns: Side | None, target: Target | None):
    """Returns a function of x [v, b, r, c], scalars [v or 1, 6] and signs [v or 1, 2, 64]; vmap grows v.

    JAX keeps what it traced of the function, hence one for each target.
    """

    @jax.custom_batching.custom_vmap
    def run(x, scalars, signs):
        places = [jnp.arange(n, dtype=jnp.uint32) for n in x.shape[1:]]
        return _on_mesh(rows, columns, target, x.shape, scalars.shape[0], signs.shape[0])(
            x, scalars, signs, *places
        )

    @run.def_vmap
    def _(size, batched, x, scalars, signs):
        x = x if batched[0] else jnp.broadcast_to(x, (size, *x.shape))
        small = []
        for array, mapped in zip((scalars, signs), batched[1:], strict=True):
            if mapped or array.shape[0] > 1:
                array = array if mapped else jnp.broadcast_to(array, (size, *array.shape))
                array = jnp.broadcast_to(array, (*x.shape[:2], *array.shape[2:]))
                array = array.reshape(math.prod(array.shape[:2]), *array.shape[2:])
            small.append(array)
        results = run(x.reshape(math.prod(x.shape[:2]), *x.shape[2:]), *small)
        results = [y.reshape(*x.shape[:2], *y.shape[1:]) for y in results]
        return results, [True] * len(results)

    return run


def _on_mesh(rows: Side | None, columns: Side | None, target, shape, keys: int, signs: int):
    """Returns the call that a mesh may cut up along all axes of x, but not within blocks or runs.

    It takes the places of x's batches, rows and columns in the whole too, from which a part learns its own.
    """
    *_, r, c = shape
    r_axis, r_sizes, r_whole = compound("r", r, _unit(columns, rows))
    c_axis, c_sizes, c_whole = compound("c", c, _unit(rows, columns))
    sizes, whole = r_sizes | c_sizes, [*r_whole, *c_whole, "scalars", "side", "sign"]
    arguments = [
        f"v b {r_axis} {c_axis}",
        f"{'v' if keys > 1 else 'one'} scalars",
        f"{'v' if signs > 1 else 'once'} side sign",
        "b",
        r_axis,
        c_axis,
    ]
    results = []
    for side, other, name in ((rows, r_axis, "c"), (columns, c_axis, "r")):
        if side is None:
            continue
        words = sizes.get(f"{name}i", 0) // 8 * WORDS[side.form]
        for what, inner in (("words", words), ("scales", sizes.get(f"{name}i", 0) // BLOCK)):
            axis, more, uncut = along(name, what, inner)
            sizes |= more
            whole += uncut
            results.append(f"v b {other} {axis}")
    rule = ", ".join(arguments) + " -> " + ", ".join(results)
    run = functools.partial(_call, rows, columns, target, (r, c))
    return partitioned(run, rule, sizes, whole)


def _unit(blocked: Side | None, other: Side | None) -> int:
    """Returns what an axis must be cut in multiples of, that `blocked` blocks and `other` does not."""
    unit = blocked.length(1) if blocked else 1
    return max(unit, BLOCK) if other and other.operand.block_shape == (BLOCK, BLOCK) else unit


def _call(
    rows: Side | None,
    columns: Side | None,
    target: Target | None,
    whole: tuple[int, int],
    x,
    scalars,
    signs,
    *places,
) -> list[jax.Array]:
    """Runs the kernel on x, a part of a tensor of `whole` rows and columns at the `places` given."""
    launch = launch_of(rows, columns, target, x.shape, x.dtype, whole)
    inputs, strides = (x,), {}
    if launch.kernel is quantize_kernel:
        inputs, strides = _inputs([side for side in (rows, columns) if side], x, scalars, signs, places)
    results = triton_call(
        launch.kernel,
        *inputs,
        out=launch.out,
        grid=launch.grid,
        num_warps=launch.num_warps,
        **launch.constants,
        **strides,
    )
    return [y for y, side in zip(results, (rows, rows, columns, columns), strict=True) if side]


def _inputs(sides: list[Side], x, scalars, signs, places) -> tuple[tuple[jax.Array, ...], dict[str, int]]:
    """Returns the arrays that `quantize_kernel` takes, and the strides of the latter two.

    What no side reads is not made, which would be a kernel of its own: x stands in its place.
    """
    strides = {"SCALARS_STRIDE": 0, "SIGNS_STRIDE": 0}
    if any(side.reads_scalars for side in sides):
        place = jnp.stack([axis[0] if axis.size else jnp.uint32(0) for axis in places])
        scalars = jnp.concatenate([scalars, jnp.broadcast_to(place, (scalars.shape[0], 3))], axis=1)
        strides["SCALARS_STRIDE"] = SCALARS if scalars.shape[0] > 1 else 0
    else:
        scalars = x
    if any(side.reads_signs for side in sides):
        strides["SIGNS_STRIDE"] = 2 * LARGEST_ROTATION if signs.shape[0] > 1 else 0
    else:
        signs = x
    return (x, scalars, signs), strides
