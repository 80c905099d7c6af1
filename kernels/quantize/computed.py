"""Hopper's kernels for operands that are computed where they are quantized: tensors in, both operands out."""

import functools
import math

import jax
import jax.numpy as jnp

from mxjax.computed import Computed
from mxjax.devices import Target, current_target
from mxjax.formats import BLOCK
from mxjax.gated import GatedGradient
from mxjax.gemm_input import GemmInput
from mxjax.kernels.launch import triton_call
from mxjax.kernels.mesh import along, compound, partitioned
from mxjax.kernels.quantize.launches import ComputedKind, Pair, computed_launch_of
from mxjax.kernels.quantize.quantizer import elements_of
from mxjax.kmajor import KMajor
from mxjax.normed import Normed
from mxjax.product import Product


def quantize_computed(x: Computed, rows: GemmInput, columns: GemmInput) -> list[KMajor]:
    """Returns the values of x, rounded to bfloat16, packed for both inputs.

    Values differ from XLA's (`x.value`) by a unit in the last place of bfloat16 at most, unless a product
    on the way overflows or is subnormal: the logistic function of a gate below -87 counts as zero, and
    it is applied first. A block whose values have NaN or infinity is NaN.

    Args:
      x: made of tensors in bfloat16; products may have factors or not.
      rows, columns: inputs that `takes_computed` accepts, along -1 and -2.
    Raises:
      TypeError: a tensor in another dtype.
    """
    kind, arrays = _arrays_of(x)
    for array in arrays[::3]:
        if array.dtype != jnp.bfloat16:
            raise TypeError(f"quantize_computed needs tensors in bfloat16, got {array.dtype}")
    *batch, r, n = arrays[0].shape
    n = n // 2 if kind == "gated" else n
    v = math.prod(batch)
    run = _quantizer((rows.options, columns.options), kind, current_target())
    made = run(*(a.reshape(v, *a.shape[len(batch) :]) for a in arrays))
    return [
        KMajor(elements_of(words, "packed").reshape(*batch, other, -1), scales.reshape(*batch, other, -1))
        for words, scales, other in ((*made[:2], r), (*made[2:], n))
    ]


def _arrays_of(x: Computed) -> tuple[ComputedKind, list[jax.Array]]:
    """Returns the tensors, each followed by two arrays for its rows and its columns, all with batch axes."""
    if isinstance(x, Normed):
        scale = jnp.broadcast_to(x.scale.astype(x.x.dtype), (*x.x.shape[:-2], x.x.shape[-1]))
        return "normed", [x.x, x.factors, scale]
    arrays = [array for product in x for array in _with_factors(product)]
    return "gradient" if isinstance(x, GatedGradient) else "gated", arrays


def _with_factors(product: Product) -> tuple[jax.Array, jax.Array, jax.Array]:
    *batch, r, n = product.raw.shape
    rows, columns = product.factors or (jnp.ones((*batch, m), jnp.float32) for m in (r, n))
    return product.raw, rows, columns


@functools.cache
def _quantizer(pair: Pair, kind: ComputedKind, target: Target | None):
    """Returns a function of tensors [v, r, n], each followed by arrays [v, r] and [v, n]; vmap grows v.

    JAX caches the function's trace, hence a separate function for each target.
    """
    del target

    @jax.custom_batching.custom_vmap
    def run(*arrays):
        return _on_mesh(pair, kind, arrays[0].shape)(*arrays)

    @run.def_vmap
    def _(size, batched, *arrays):
        every = [
            a if b else jnp.broadcast_to(a, (size, *a.shape)) for a, b in zip(arrays, batched, strict=True)
        ]
        results = run(*(a.reshape(-1, *a.shape[2:]) for a in every))
        results = [y.reshape(size, -1, *y.shape[1:]) for y in results]
        return results, [True] * len(results)

    return run


_COLUMNS: dict[ComputedKind, tuple[str, ...]] = {
    "normed": ("c",),
    "gated": ("two_c",),
    "gradient": ("two_c", "c"),
}
"""The columns of each tensor."""


def _on_mesh(pair: Pair, kind: ComputedKind, shape: tuple[int, ...]):
    """Returns the call that a mesh may shard along rows, but not within blocks or rotations."""
    _, columns = pair
    assert columns is not None
    r_axis, sizes, whole = compound("r", shape[1], columns.padded(1))
    tensors = _COLUMNS[kind]
    arguments = [term for n in tensors for term in (f"v {r_axis} {n}", f"v {r_axis}", f"v {n}")]
    results = [f"v {r_axis} row_words", f"v {r_axis} row_scales"]
    whole = [*whole, *tensors, "row_words", "row_scales"]
    other = "two_c" if kind == "gradient" else "c"
    for what, each in (("words", 8), ("scales", BLOCK)):
        axis, more, uncut = along("r", what, sizes.get("ri", 0) // each)
        sizes |= more
        whole += uncut
        results.append(f"v {other} {axis}")
    rule = ", ".join(arguments) + " -> " + ", ".join(results)
    return partitioned(functools.partial(_call, pair, kind), rule, sizes, [*whole, other])


def _call(pair: Pair, kind: ComputedKind, *arrays: jax.Array) -> list[jax.Array]:
    v, r, n = arrays[0].shape
    launch = computed_launch_of(pair, kind, (v, r, n if kind == "normed" else n // 2))
    return triton_call(
        launch.kernel,
        *arrays,
        out=launch.out,
        grid=launch.grid,
        num_warps=launch.num_warps,
        **launch.constants,
    )
