"""Hopper's kernels for SwiGLU as JAX functions: products in, the K-major operands of two GEMMs out."""

import functools
import math

import jax
import jax.numpy as jnp

from mxjax.devices import Target, current_target
from mxjax.formats import BLOCK
from mxjax.gated import Gated, GatedGradient
from mxjax.gemm_input import GemmInput
from mxjax.kernels.launch import triton_call
from mxjax.kernels.mesh import along, compound, partitioned
from mxjax.kernels.quantize.launches import Pair, gated_launch_of
from mxjax.kernels.quantize.quantizer import elements_of
from mxjax.kmajor import KMajor
from mxjax.product import Product


def quantize_gated(x: Gated | GatedGradient, rows: GemmInput, columns: GemmInput) -> list[KMajor]:
    """Returns the values of x, rounded to bfloat16, packed for both inputs.

    Values differ from XLA's (`Gated.value`) by a unit in the last place of bfloat16 at most, unless a product
    on the way overflows or is subnormal: the logistic function of a gate below -87 counts as zero, and
    it is applied first. A block with NaN or infinity is NaN.

    Args:
      x: products in bfloat16, with or without factors.
      rows, columns: inputs that `takes_gated` accepts, along -1 and -2.
    Raises:
      TypeError: a product in another dtype.
    """
    for product in x:
        if product.raw.dtype != jnp.bfloat16:
            raise TypeError(f"quantize_gated needs products in bfloat16, got {product.raw.dtype}")
    arrays = [array for product in x for array in _with_factors(product)]
    *batch, r, n = arrays[0].shape
    n = n // 2 if isinstance(x, Gated) else n
    v = math.prod(batch)
    run = _quantizer((rows.options, columns.options), isinstance(x, GatedGradient), current_target())
    made = run(*(a.reshape(v, *a.shape[len(batch) :]) for a in arrays))
    return [
        KMajor(elements_of(words, "packed").reshape(*batch, other, -1), scales.reshape(*batch, other, -1))
        for words, scales, other in ((*made[:2], r), (*made[2:], n))
    ]


def _with_factors(product: Product) -> tuple[jax.Array, jax.Array, jax.Array]:
    *batch, r, n = product.raw.shape
    rows, columns = product.factors or (jnp.ones((*batch, m), jnp.float32) for m in (r, n))
    return product.raw, rows, columns


@functools.cache
def _quantizer(pair: Pair, of_gradient: bool, target: Target | None):
    """Returns a function of raw products [v, r, n] and their factors [v, r] and [v, n]; vmap grows v.

    JAX caches the function's trace, hence a separate function for each target.
    """
    del target

    @jax.custom_batching.custom_vmap
    def run(*arrays):
        return _on_mesh(pair, of_gradient, arrays[0].shape)(*arrays)

    @run.def_vmap
    def _(size, batched, *arrays):
        every = [
            a if b else jnp.broadcast_to(a, (size, *a.shape)) for a, b in zip(arrays, batched, strict=True)
        ]
        results = run(*(a.reshape(-1, *a.shape[2:]) for a in every))
        results = [y.reshape(size, -1, *y.shape[1:]) for y in results]
        return results, [True] * len(results)

    return run


def _on_mesh(pair: Pair, of_gradient: bool, shape: tuple[int, ...]):
    """Returns the call that a mesh may shard along rows, but not within blocks or rotations."""
    _, columns = pair
    assert columns is not None
    r_axis, sizes, whole = compound("r", shape[1], columns.padded(1))
    products = ["two_c", "c"] if of_gradient else ["two_c"]
    arguments = [term for n in products for term in (f"v {r_axis} {n}", f"v {r_axis}", f"v {n}")]
    results = [f"v {r_axis} row_words", f"v {r_axis} row_scales"]
    whole = [*whole, *products, "row_words", "row_scales"]
    other = "two_c" if of_gradient else "c"
    for what, each in (("words", 8), ("scales", BLOCK)):
        axis, more, uncut = along("r", what, sizes.get("ri", 0) // each)
        sizes |= more
        whole += uncut
        results.append(f"v {other} {axis}")
    rule = ", ".join(arguments) + " -> " + ", ".join(results)
    return partitioned(functools.partial(_call, pair), rule, sizes, [*whole, other])


def _call(pair: Pair, *arrays: jax.Array) -> list[jax.Array]:
    v, r, two_c = arrays[0].shape
    launch = gated_launch_of(pair, (v, r, two_c // 2), of_gradient=len(arrays) > 3)
    return triton_call(
        launch.kernel,
        *arrays,
        out=launch.out,
        grid=launch.grid,
        num_warps=launch.num_warps,
        **launch.constants,
    )
