"""Plans for operations that keep a weight's elements: casts, and changes of shape, place and sharding."""

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from mxjax.transform.interpreter import Context, Outcome, Planner, bind, plan_other
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
    """Keeps deferred casts if they are the same for all operands but integers, which are indices."""
    arrays = [
        origin
        for origin, atom in zip(inputs, eqn.invars, strict=True)
        if jnp.issubdtype(aval(atom).dtype, jnp.floating)
    ]
    casts = {origin.casts for origin in arrays}
    if len(casts) != 1 or casts == {()} or not join(inputs).is_weight:
        return plan_other(eqn, inputs, context)
    outputs = [join(inputs)._replace(casts=casts.pop())] * len(eqn.outvars)
    return Outcome(inputs, outputs, run=lambda eqn, values, draw: bind(eqn, values))


def _plan_each(eqn: JaxprEqn, inputs: list[Origin], context: Context) -> Outcome:
    """Plans operations whose results are their inputs, one by one."""
    del context
    return Outcome(inputs, inputs, run=lambda eqn, values, draw: bind(eqn, values))


_RESHAPES = (
    "concatenate",
    "copy",
    "dynamic_slice",
    "name",
    "reshape",
    "rev",
    "sharding_constraint",
    "slice",
    "split",
    "squeeze",
    "transpose",
)
_EACH = ("device_put", "optimization_barrier", "pvary", "reshard")

PLANNERS: dict[str, Planner] = {
    "convert_element_type": _plan_cast,
    **dict.fromkeys(_RESHAPES, _plan_reshape),
    **dict.fromkeys(_EACH, _plan_each),
}
