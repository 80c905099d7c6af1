"""Plans for operations that hold jaxprs: calls, loops, branches, remat, custom derivatives, shards.

One with a product to change is built anew by JAX's public function of that name; the others stay as they are.
A custom derivative whose primal has a product to change is differentiated through, its rule is not used: the
rule's own products would not be those of the policy. The report says so.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec

from mxjax.transform.interpreter import Context, Draw, Outcome, Plan, Planner, evaluate, make_plan, whole
from mxjax.transform.tracing import Origin, all_seen, cast, join


def _plan_jit(eqn: JaxprEqn, inputs: list[Origin], context: Context) -> Outcome:
    inner = make_plan(eqn.params["jaxpr"], inputs, context)

    def run(eqn: JaxprEqn, values: list[Any], draw: Draw) -> Sequence[Any]:
        def call(*arguments):
            return evaluate(inner, arguments, draw, keep_casts=True)

        call.__name__ = eqn.params["name"]
        kept = {name: eqn.params[name] for name in ("in_shardings", "out_shardings", "inline")}
        options = dict(eqn.params["compiler_options_kvs"]) or None
        return jax.jit(call, compiler_options=options, **kept)(*values)

    return whole(eqn, inputs, inner.outputs, [inner], run)


def _plan_remat(eqn: JaxprEqn, inputs: list[Origin], context: Context) -> Outcome:
    inner = make_plan(eqn.params["jaxpr"], inputs, context)

    def run(eqn: JaxprEqn, values: list[Any], draw: Draw) -> Sequence[Any]:
        kept = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
        return jax.checkpoint(lambda *arguments: evaluate(inner, arguments, draw), **kept)(*values)

    return whole(eqn, inputs, cast(inner.outputs), [inner], run)


def _plan_call(eqn: JaxprEqn, inputs: list[Origin], context: Context) -> Outcome:
    inner = make_plan(eqn.params["call_jaxpr"], inputs, context)

    def run(eqn: JaxprEqn, values: list[Any], draw: Draw) -> Sequence[Any]:
        del eqn
        return evaluate(inner, values, draw)

    return whole(eqn, inputs, cast(inner.outputs), [inner], run)


def _plan_custom_derivative(eqn: JaxprEqn, inputs: list[Origin], context: Context) -> Outcome:
    outcome = _plan_call(eqn, inputs, context)
    kind = eqn.primitive.name.removesuffix("_call")
    why = f"differentiated through: the {kind} rule around it is not used"
    found = [f if f.policy is None else dataclasses.replace(f, why=why) for f in outcome.found]
    return outcome._replace(found=tuple(found))


def _until_stable(plan: Callable[[list[Origin]], Plan], carry: list[Origin]) -> tuple[Plan, list[Origin]]:
    """Returns a loop's plan and the origins of its carry, which are those before and after each step."""
    while True:
        inner = plan(carry)
        after = [join(pair) for pair in zip(carry, inner.outputs[: len(carry)], strict=True)]
        if after == carry:
            return inner, carry
        carry = after


def _plan_scan(eqn: JaxprEqn, inputs: list[Origin], context: Context) -> Outcome:
    consts, carry, xs = _scan_parts(eqn, inputs)
    inner, carry = _until_stable(
        lambda carry: make_plan(eqn.params["jaxpr"], [*consts, *carry, *xs], context), cast(carry)
    )

    def run(eqn: JaxprEqn, values: list[Any], draw: Draw) -> Sequence[Any]:
        consts, init, xs = _scan_parts(eqn, values)
        init = all_seen(init, _scan_parts(eqn, inputs)[1])

        def step(state, slices):
            index, xs = slices
            here = draw if index is None else draw.inside(index)
            results = evaluate(inner, [*consts, *state, *xs], here)
            return [*results[: len(init)]], results[len(init) :]

        kept = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        index = lax.iota("int32", kept["length"]) if inner.draws else None
        state, ys = lax.scan(step, init, (index, xs), **kept)
        return [*state, *ys]

    return whole(eqn, inputs, [*carry, *cast(inner.outputs[len(carry) :])], [inner], run)


def _scan_parts(eqn: JaxprEqn, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Returns those of the constants, of the carry and of the scanned arrays."""
    consts, carry, xs = (list(part) for part in eqn.params["ft_in"].update(list(values)).unpack())
    return consts, carry, xs


def _plan_while(eqn: JaxprEqn, inputs: list[Origin], context: Context) -> Outcome:
    condition_consts, body_consts, carry = _while_parts(eqn, inputs)

    def plan_body(carry: list[Origin]) -> Plan:
        return make_plan(eqn.params["body_jaxpr"], [*body_consts, *carry], context)

    body, carry = _until_stable(plan_body, cast(carry))
    after_body = context._replace(start=context.start + len(body.found))
    condition = make_plan(eqn.params["cond_jaxpr"], [*condition_consts, *carry], after_body)

    def run(eqn: JaxprEqn, values: list[Any], draw: Draw) -> Sequence[Any]:
        condition_consts, body_consts, init = _while_parts(eqn, values)
        init = all_seen(init, _while_parts(eqn, inputs)[2])

        def proceed(state):
            index, *carry = state
            return evaluate(condition, [*condition_consts, *carry], draw.inside(index))[0]

        def step(state):
            index, *carry = state
            return [index + 1, *evaluate(body, [*body_consts, *carry], draw.inside(index))]

        return lax.while_loop(proceed, step, [lax.full((), 0, "int32"), *init])[1:]

    return whole(eqn, inputs, carry, [body, condition], run)


def _while_parts(eqn: JaxprEqn, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Returns those of the condition's constants, of the body's and of the carry."""
    first = eqn.params["cond_nconsts"]
    second = first + eqn.params["body_nconsts"]
    return list(values[:first]), list(values[first:second]), list(values[second:])


def _plan_cond(eqn: JaxprEqn, inputs: list[Origin], context: Context) -> Outcome:
    plans: list[Plan] = []
    for branch in eqn.params["branches"]:
        plans.append(make_plan(branch, inputs[1:], context))
        context = context._replace(start=context.start + len(plans[-1].found))
    outputs = [join((inputs[0], *each)) for each in zip(*(plan.outputs for plan in plans), strict=True)]

    def run(eqn: JaxprEqn, values: list[Any], draw: Draw) -> Sequence[Any]:
        del eqn
        branches = [_branch(plan, draw) for plan in plans]
        return lax.switch(values[0], branches, *values[1:])

    return whole(eqn, inputs, outputs, plans, run)


def _branch(plan: Plan, draw: Draw) -> Callable[..., tuple[Any, ...]]:
    return lambda *arguments: evaluate(plan, arguments, draw)


def _plan_shard_map(eqn: JaxprEqn, inputs: list[Origin], context: Context) -> Outcome:
    inner = make_plan(eqn.params["jaxpr"], inputs, context)

    def run(eqn: JaxprEqn, values: list[Any], draw: Draw) -> Sequence[Any]:
        def shard(draw, *arguments):
            return evaluate(inner, arguments, draw)

        return jax.shard_map(
            shard,
            mesh=eqn.params["mesh"],
            in_specs=(PartitionSpec(), *eqn.params["in_specs"]),
            out_specs=eqn.params["out_specs"],
            axis_names=eqn.params["newly_manual_axes"],
            check_vma=eqn.params["check_vma"],
        )(draw, *values)

    return whole(eqn, inputs, cast(inner.outputs), [inner], run)


PLANNERS: dict[str, Planner] = {
    "jit": _plan_jit,
    "remat2": _plan_remat,
    "closed_call": _plan_call,
    "core_call": _plan_call,
    "custom_jvp_call": _plan_custom_derivative,
    "custom_vjp_call": _plan_custom_derivative,
    "scan": _plan_scan,
    "while": _plan_while,
    "cond": _plan_cond,
    "shard_map": _plan_shard_map,
}
