"""Functions as JAX primitives with a reverse mode alone, so that each chooses what `jax.vmap` makes of it."""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from mxjax.derivatives import refuse_linearize, reverse_mode_only

Batch = Callable[..., tuple[jax.Array, int]]


def as_primitive(name: str, function: Callable[..., Any], batch: Batch) -> Callable[..., jax.Array]:
    """Returns `function` as a primitive: a call of it is one equation, for which `batch` is the rule of vmap.

    The primitive says nothing about derivatives: `function` does, at the tracing that differentiates.

    Args:
      function: takes hashable options, then pytrees of arrays, and returns an array.
      batch: takes the options, the operands and the axes that are mapped, None where none is, both in the
        structure of the arguments; returns the result and its mapped axis.
    """
    primitive = Primitive(name)

    @functools.cache
    def jitted(options: Hashable):
        """Returns the function with these options, whose traces JAX caches."""
        return jax.jit(functools.partial(function, options))

    def call(options: Hashable, *arguments: Any) -> jax.Array:
        operands, tree = jax.tree.flatten(arguments)
        # Traced now, for the target and the mesh of this place; a program may be lowered in another.
        jaxpr = jitted(options).trace(*arguments).jaxpr
        return primitive.bind(*operands, options=options, tree=tree, jaxpr=jaxpr)

    def on_operands(*operands, options, tree, jaxpr):
        del jaxpr
        return function(options, *tree.unflatten(operands))

    def run(*operands, options, tree, jaxpr):
        del options, tree
        return jaxpr_as_fun(jaxpr)(*operands)[0]

    def differentiate(primals, tangents, **parameters):
        """Returns the result and its tangent by the function's rule, which has a reverse mode alone."""
        moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

        def of_moving(*moved):
            operands = list(primals)
            for i, operand in zip(moving, moved, strict=True):
                operands[i] = operand
            return on_operands(*operands, **parameters)

        moves = reverse_mode_only([tangents[i] for i in moving])
        return jax.jvp(of_moving, [primals[i] for i in moving], moves)

    def batched(operands, axes, *, options, tree, jaxpr):
        del jaxpr
        return batch(options, tree.unflatten(operands), tree.unflatten(axes))

    primitive.def_impl(on_operands)
    primitive.def_abstract_eval(lambda *_, jaxpr, **__: jaxpr.out_avals[0])
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=False))
    ad.primitive_jvps[primitive] = differentiate
    refuse_linearize(primitive)
    batching.primitive_batchers[primitive] = batched
    return call
