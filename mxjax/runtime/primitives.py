"""Products as JAX primitives with first-order reverse mode alone, and a rule of their own for `jax.vmap`.

A derivative that a product does not have raises an error that says so, instead of giving a wrong number.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax._src.interpreters.ad import fallback_linearize_rule, primitive_linearizations  # no public names
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float


@jax.custom_jvp
def first_order_only[T](x: T) -> T:
    """Returns x, an array or a pytree of them; differentiating it raises NotImplementedError."""
    return x


@first_order_only.defjvp
def _raise_on_second_derivative(primals, tangents):
    raise NotImplementedError(
        "mxjax's products have no second derivative: quantization is piecewise constant. "
        "Use those of jax.numpy where you need one."
    )


def reverse_mode_only(tangents: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns tangents that can be transposed, as reverse mode does, but not computed: that raises."""
    return _reverse_mode_only_p.bind(*tangents)


def without_forward_mode(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns x; `jax.jvp` and `jax.linearize` of it raise TypeError."""
    return _without_forward_mode_p.bind(x)


def refuse_linearize(primitive: Primitive) -> None:
    """Makes `jax.linearize` of a primitive raise TypeError where it is called, not where its result is."""

    def rule(is_vjp, *args, **params):
        if not is_vjp:
            _raise_on_forward_mode()
        return fallback_linearize_rule(primitive, is_vjp, *args, **params)

    primitive_linearizations[primitive] = rule


def _raise_on_forward_mode(*_, **__):
    raise TypeError(
        "mxjax's products have no forward mode (jax.jvp, jax.jacfwd, jax.linearize): their gradients are "
        "GEMMs of their own. Use jax.grad, jax.vjp or jax.jacrev."
    )


_reverse_mode_only_p = Primitive("mxjax_reverse_mode_only")
_reverse_mode_only_p.multiple_results = True
_reverse_mode_only_p.def_impl(_raise_on_forward_mode)
_reverse_mode_only_p.def_abstract_eval(lambda *tangents: list(tangents))
mlir.register_lowering(_reverse_mode_only_p, _raise_on_forward_mode)
batching.primitive_batchers[_reverse_mode_only_p] = _raise_on_forward_mode
ad.primitive_transposes[_reverse_mode_only_p] = lambda cotangents, *_: cotangents

_without_forward_mode_p = Primitive("mxjax_without_forward_mode")
_without_forward_mode_p.def_impl(lambda x: x)
_without_forward_mode_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(_without_forward_mode_p, lambda _, x: [x])
batching.primitive_batchers[_without_forward_mode_p] = lambda operands, axes: (
    without_forward_mode(operands[0]),
    axes[0],
)
ad.primitive_jvps[_without_forward_mode_p] = lambda primals, tangents: (
    without_forward_mode(primals[0]),
    tangents[0] if isinstance(tangents[0], ad.Zero) else reverse_mode_only(tangents)[0],
)
refuse_linearize(_without_forward_mode_p)


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
