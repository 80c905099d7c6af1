"""Plans for operations that keep a weight's elements: casts, and changes of shape, place and sharding."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from mxjax.transform.interpreter import Context, Draw, Outcome, Planner, bind, plan_other
from mxjax.transform.origins import CASTS, Origin, aval, join


def _plan_cast(eqn: JaxprEqn, inputs: list[Origin], context: Context) -> Outcome:
    """Defers a cast between floating-point dtypes, for parameters whose casts are."""
    [origin] = inputs
    before, after = aval(eqn.invars[0]).dtype, aval(eqn.outvars[0]).dtype
    if not origin.is_weight or not context.deferred.issuperset(origin.paths):
        return plan_other(eqn, inputs, context)
    if any(jnp.dtype(dtype) not in map(jnp.dtype, CASTS) for dtype in (before, after)):
        return plan_other(eqn, inputs, context)
    deferred = origin._replace(casts=(*(origin.casts or (before,)), after))
    return Outcome(inputs, [deferred], run=lambda eqn, values, draw: values)


def _plan_reshape(eqn: JaxprEqn, inputs: list[Origin], context: Context) -> Outcome:
    """Keeps deferred casts that all weights share, if the dtype before them holds all constants."""
    floating = [jnp.issubdtype(aval(atom).dtype, jnp.floating) for atom in eqn.invars]
    fills = [f and not (o.paths or o.data) for f, o in zip(floating, inputs, strict=True)]
    casts = {o.casts for o, f, fill in zip(inputs, floating, fills, strict=True) if f and not fill}
    if len(casts) != 1 or casts == {()} or not join(inputs).is_weight:
        return plan_other(eqn, inputs, context)
    [(before, *later)] = casts
    if (any(fills) or eqn.params.get("fill_value") is not None) and before not in (jnp.float32, later[-1]):
        return plan_other(eqn, inputs, context)

    def run(eqn: JaxprEqn, values: list[Any], draw: Draw) -> Sequence[Any]:
        del draw
        cast = [lax.convert_element_type(v, before) if f else v for v, f in zip(values, fills, strict=True)]
        return bind(eqn, cast)

    return Outcome(inputs, [join(inputs)._replace(casts=(before, *later))] * len(eqn.outvars), run=run)


def _plan_each(eqn: JaxprEqn, inputs: list[Origin], context: Context) -> Outcome:
    """Plans operations whose results are their inputs, one by one."""
    del context
    return Outcome(inputs, inputs, run=lambda eqn, values, draw: bind(eqn, values))


_RESHAPES = (
    "broadcast_in_dim",
    "concatenate",
    "copy",
    "dynamic_slice",
    "dynamic_update_slice",
    "gather",
    "name",
    "pad",
    "reshape",
    "rev",
    "select_n",
    "sharding_constraint",
    "slice",
    "split",
    "squeeze",
    "stack",
    "stop_gradient",
    "tile",
    "transpose",
)
_EACH = ("device_put", "optimization_barrier", "pvary", "reshard")

PLANNERS: dict[str, Planner] = {
    "convert_element_type": _plan_cast,
    **dict.fromkeys(_RESHAPES, _plan_reshape),
    **dict.fromkeys(_EACH, _plan_each),
}
