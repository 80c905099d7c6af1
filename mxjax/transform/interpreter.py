"""Interprets a jaxpr twice: `make_plan` finds what to change, `evaluate` computes with the changes.

Operations that hold no product to change are bound as they are, with the functions inside them: the rest of
a program keeps its bits, its custom derivatives and its kernels.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxprs_in_params

from mxjax.policy.policy import Policy
from mxjax.transform.report import Found
from mxjax.transform.tracing import CASTS, CONSTANT, DATA, Origin, all_seen, aval, cast, join


class Draw(NamedTuple):
    """The caller's key and the loop indices from which a product's key is folded.

    Attributes:
      key: the caller's key, or None.
      indices: indices of the loops around this place, the outermost first.
    """

    key: jax.Array | None
    indices: tuple[jax.Array, ...] = ()

    def inside(self, index: jax.Array) -> "Draw":
        """Returns the same for the body of a loop at its step `index`."""
        return self._replace(indices=(*self.indices, index))

    def product_key(self, number: int, x: Any) -> jax.Array:
        """Returns the key of product `number`: folded with it, loop indices, and the shard's of x, if any."""
        assert self.key is not None
        key = jax.random.fold_in(self.key, number)
        shard = [jax.lax.axis_index(axis) for axis in sorted(jax.typeof(x).mat.varying)]
        for index in (*self.indices, *shard):
            key = jax.random.fold_in(key, index)
        return key


Run = Callable[[JaxprEqn, list[Any], Draw], Sequence[Any]]
"""Computes an equation from its inputs, whose casts are deferred as their origins say."""


class Outcome(NamedTuple):
    """The plan for one equation.

    Attributes:
      inputs, outputs: origins of the equation's inputs and outputs.
      found: products in it.
      run: computes it; None binds its primitive as it is.
    """

    inputs: list[Origin]
    outputs: list[Origin]
    found: tuple[Found, ...] = ()
    run: Run | None = None


class Context(NamedTuple):
    """The policies and the position in the function, which plans depend on besides the jaxpr.

    Attributes:
      policies: each parameter's policy by its path; None leaves its products alone.
      deferred: paths of parameters whose casts are deferred.
      planners: functions that plan primitives, by the primitives' names.
      start: number of products found so far.
      mark: the entry of equations' name stacks that marks a gradient; see `gradient_mark`.
      in_gradient: whether this is in a gradient that the function itself computes.
    """

    policies: Mapping[str, Policy | None]
    deferred: frozenset[str]
    planners: Mapping[str, "Planner"]
    mark: Any
    start: int = 0
    in_gradient: bool = False


Planner = Callable[[JaxprEqn, list[Origin], Context], Outcome]


class Plan(NamedTuple):
    """The plan for a jaxpr: an `Outcome` for each equation, and the origins of its results."""

    jaxpr: Jaxpr
    outcomes: list[Outcome]
    outputs: list[Origin]

    @property
    def found(self) -> tuple[Found, ...]:
        """All products found, in order."""
        return tuple(found for outcome in self.outcomes for found in outcome.found)

    @property
    def changes(self) -> bool:
        """Whether any product runs in a policy."""
        return any(found.policy is not None for found in self.found)

    @property
    def draws(self) -> bool:
        """Whether any product draws random bits."""
        return any(found.policy is not None and found.policy.needs_key for found in self.found)


def make_plan(jaxpr: Jaxpr, inputs: Sequence[Origin], context: Context) -> Plan:
    """Returns the plan for a jaxpr whose arguments have these origins."""
    constants = [DATA if aval(var).shape else CONSTANT for var in jaxpr.constvars]
    origins = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *inputs), strict=True))

    def read(atom: Any) -> Origin:
        return CONSTANT if isinstance(atom, Literal) else origins[atom]

    outcomes: list[Outcome] = []
    for eqn in jaxpr.eqns:
        in_gradient = context.in_gradient or context.mark in eqn.source_info.name_stack.stack
        planner = context.planners.get(eqn.primitive.name, _plan_unknown)
        outcome = planner(eqn, [read(atom) for atom in eqn.invars], context._replace(in_gradient=in_gradient))
        outcomes.append(outcome)
        origins.update(zip(eqn.outvars, outcome.outputs, strict=True))
        context = context._replace(start=context.start + len(outcome.found))
    return Plan(jaxpr, outcomes, [read(atom) for atom in jaxpr.outvars])


def gradient_mark(jaxpr: Jaxpr) -> Any:
    """Returns what marks gradients in name stacks: transposes; if there are none, all of forward mode.

    A gradient in reverse mode marks its forward pass, too, as forward mode does.
    """
    forward, transpose = (
        source_info_util.new_name_stack().transform(name).stack[-1] for name in ("jvp", "transpose")
    )

    def transposes(jaxpr: Jaxpr) -> bool:
        return any(
            transpose in eqn.source_info.name_stack.stack
            or any(map(transposes, jaxprs_in_params(eqn.params)))
            for eqn in jaxpr.eqns
        )

    return transpose if transposes(jaxpr) else forward


def plan_other(eqn: JaxprEqn, inputs: list[Origin], context: Context) -> Outcome:
    """Plans a primitive that stays as it is: each result depends on all inputs."""
    del context
    return Outcome(inputs, [join(inputs)] * len(eqn.outvars))


def _plan_unknown(eqn: JaxprEqn, inputs: list[Origin], context: Context) -> Outcome:
    """Plans a primitive without a planner. If it holds jaxprs that multiply weights, the report says so."""
    outcome = plan_other(eqn, inputs, context)
    paths = join(origin for origin in inputs if origin.is_weight).paths
    if not paths or not _multiplies(eqn):
        return outcome
    why = f"transform does not look inside {eqn.primitive.name}"
    return outcome._replace(found=(Found(context.start, eqn.primitive.name, paths, (), None, why),))


def _multiplies(eqn: JaxprEqn) -> bool:
    """Whether an equation multiplies matrices, itself or in a jaxpr that it holds."""
    multiply = ("dot_general", "ragged_dot_general", "conv_general_dilated")
    return eqn.primitive.name in multiply or any(
        _multiplies(inner) for jaxpr in jaxprs_in_params(eqn.params) for inner in jaxpr.eqns
    )


def evaluate(
    plan: Plan, arguments: Sequence[Any], draw: Draw, *, keep_casts: bool = False
) -> tuple[Any, ...]:
    """Returns the results of a jaxpr by its plan.

    Args:
      arguments: values whose casts are deferred as the origins say that the plan was made for.
      keep_casts: whether the results' casts stay deferred.
    """
    jaxpr = plan.jaxpr
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*jaxpr.consts, *arguments), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn, outcome in zip(jaxpr.eqns, plan.outcomes, strict=True):
        stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
        with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
            run = outcome.run or _run_as_it_is(outcome)
            results = run(eqn, [read(atom) for atom in eqn.invars], draw)
        values.update(zip(eqn.outvars, results, strict=True))
    results = tuple(read(atom) for atom in jaxpr.outvars)
    return results if keep_casts else tuple(all_seen(results, plan.outputs))


def _run_as_it_is(outcome: Outcome) -> Run:
    return lambda eqn, values, draw: bind(eqn, all_seen(values, outcome.inputs))


def bind(eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
    """Returns the results of an equation's primitive for these inputs."""
    results = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return results if eqn.primitive.multiple_results else [results]


def whole(eqn: JaxprEqn, inputs: list[Origin], outputs: Sequence[Origin], plans: Sequence[Plan], run: Run):
    """Returns the outcome of an equation that holds jaxprs.

    It stays as it is if there is no product to change in them, nor a cast to defer in its outputs.
    """
    found = tuple(f for plan in plans for f in plan.found)
    if any(plan.changes for plan in plans) or any(origin.casts for origin in outputs):
        return Outcome(inputs, list(outputs), found, run)
    return Outcome(inputs, cast(outputs), found)


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

KEEPING: dict[str, Planner] = {
    "convert_element_type": _plan_cast,
    **dict.fromkeys(_RESHAPES, _plan_reshape),
    **dict.fromkeys(_EACH, _plan_each),
}
"""Plans for operations that keep a weight's elements: casts, and changes of shape, place and sharding."""
