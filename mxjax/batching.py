"""`product_of`: `matmul` as a primitive, so that `jax.vmap` of it is one product, not many small ones.

Under vmap of x alone, the mapped axis joins the tokens, and Wgrad contracts, rotates and rounds all of them.
Where w is mapped too, the mapped axis is a batch axis. Both give the bits of the call without vmap. Where the
key is mapped, each call has random bits of its own, as in a loop.

The primitive says nothing about derivatives: `matmul` does, at the tracing that differentiates.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from mxjax.derivatives import refuse_linearize, reverse_mode_only
from mxjax.matmul import Options, Weight, matmul
from mxjax.quantize import MXArray


def product_of(options: Options, x: jax.Array, w: Weight | MXArray, key: jax.Array | None) -> jax.Array:
    """Returns `matmul(options, x, w, key)`."""
    if isinstance(w, MXArray):
        leaves, frozen = jax.tree.flatten(w)
        options, w = options._replace(frozen=frozen), tuple(leaves)
    operands, tree = jax.tree.flatten((x, w, key))
    # Traced now, for the target and the mesh of this place; a program may be lowered in another.
    jaxpr = _jitted(options).trace(x, w, key).jaxpr
    return _matmul_p.bind(*operands, options=options, tree=tree, jaxpr=jaxpr)


@functools.cache
def _jitted(options: Options):
    """Returns `matmul` with these options, whose traces JAX caches."""
    return jax.jit(functools.partial(matmul, options))


_matmul_p = Primitive("mxjax_matmul")


@_matmul_p.def_impl
def _(*operands, options: Options, tree, jaxpr):
    del jaxpr
    return matmul(options, *tree.unflatten(operands))


@_matmul_p.def_abstract_eval
def _(*operands, options, tree, jaxpr):
    del operands, options, tree
    return jaxpr.out_avals[0]


def _run(*operands, options, tree, jaxpr):
    del options, tree
    return jaxpr_as_fun(jaxpr)(*operands)[0]


mlir.register_lowering(_matmul_p, mlir.lower_fun(_run, multiple_results=False))


def _differentiate(primals, tangents, *, options: Options, tree, jaxpr):
    """Returns the product and its tangent by the rule of `matmul`, which has a reverse mode alone."""
    del jaxpr
    moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def run(*moved):
        operands = list(primals)
        for i, operand in zip(moving, moved, strict=True):
            operands[i] = operand
        return matmul(options, *tree.unflatten(operands))

    moves = reverse_mode_only([tangents[i] for i in moving])
    return jax.jvp(run, [primals[i] for i in moving], moves)


ad.primitive_jvps[_matmul_p] = _differentiate
refuse_linearize(_matmul_p)


def _batch(operands, axes, *, options: Options, tree, jaxpr):
    del jaxpr
    x_axis, *other_axes = axes
    x, w, key = tree.unflatten(operands)
    if all(axis is None for axis in other_axes):
        return _join_tokens(options, jnp.moveaxis(x, x_axis, -3), w, key)
    w_axis, *more_axes = other_axes
    if options.frozen is not None or any(axis is not None for axis in more_axes):
        mapped = jax.vmap(lambda *operands: matmul(options, *tree.unflatten(operands)), tuple(axes))
        return mapped(*operands), 0
    size = w.shape[w_axis]
    return _stack(options, _mapped_first(x, x_axis, size), _mapped_first(w, w_axis, size), key)


batching.primitive_batchers[_matmul_p] = _batch


def _join_tokens(options: Options, x: jax.Array, w: Any, key: Any) -> tuple[jax.Array, int]:
    """Returns the product of x [*batch, mapped, m, k], and its mapped axis."""
    *batch, mapped, m, k = x.shape
    y = product_of(options, x.reshape(*batch, mapped * m, k), w, key)
    return y.reshape(*batch, mapped, m, y.shape[-1]), len(batch)


def _stack(options: Options, x: jax.Array, w: jax.Array, key: jax.Array | None) -> tuple[jax.Array, int]:
    """Returns the product of x [mapped, *batch, m, k] and w [mapped, *batch, k, n], and its mapped axis."""
    layout = options.gemms.layout
    if layout is not None:
        options = options._replace(gemms=options.gemms._replace(layout=layout.stacked))
    stack = x.shape[:-2]
    x, w = (t.reshape(math.prod(stack), *t.shape[-2:]) for t in (x, w))
    y = product_of(options, x, w, key)
    return y.reshape(*stack, *y.shape[-2:]), 0


def _mapped_first(x: jax.Array, axis: int | None, size: int) -> jax.Array:
    return jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
