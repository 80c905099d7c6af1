"""Plans for the operations that multiply: which run by the policy of their weight, and how."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from mxjax.policy.policy import Policy
from mxjax.products.dot import dot_general
from mxjax.products.dot_general import with_sharding
from mxjax.products.implementations import Implementation
from mxjax.products.ragged import ragged_dot
from mxjax.transform.interpreter import Context, Draw, Outcome, Planner, plan_other
from mxjax.transform.report import NO_POLICY, Found, policy_name
from mxjax.transform.tracing import CASTS, DATA, Origin, aval, quoted, seen

_MXJAX = ("mxjax_linear", "mxjax_fused_products")


def planners(implementation: Implementation | None) -> dict[str, Planner]:
    """Returns the planners of all primitives that multiply."""

    def plan_dot_general(eqn: JaxprEqn, inputs: list[Origin], context: Context) -> Outcome:
        sides = [i for i in (0, 1) if inputs[i].is_weight]
        weight = sides[0] if len(sides) == 1 else None
        found = _find(eqn, inputs, weight, context, _unfit_dot_general(eqn))

        def run(eqn: JaxprEqn, values: list[Any], draw: Draw) -> Sequence[Any]:
            assert weight is not None
            x = seen(values[1 - weight], inputs[1 - weight])
            options = _options(found, x, draw, implementation)
            return [_dot_general(eqn, x, values[weight], weight, options)]

        return _outcome(eqn, inputs, context, found, run)

    def plan_ragged_dot(eqn: JaxprEqn, inputs: list[Origin], context: Context) -> Outcome:
        weight = 1 if inputs[1].is_weight and not inputs[0].is_weight else None
        found = _find(eqn, inputs, weight, context, _unfit_ragged_dot(eqn))

        def run(eqn: JaxprEqn, values: list[Any], draw: Draw) -> Sequence[Any]:
            x, w, sizes = seen(values[0], inputs[0]), *values[1:]
            return [_ragged_dot(eqn, x, w, sizes, _options(found, x, draw, implementation))]

        return _outcome(eqn, inputs, context, found, run)

    return {
        "dot_general": plan_dot_general,
        "ragged_dot_general": plan_ragged_dot,
        "conv_general_dilated": _plan_unsupported("a convolution is no product of matrices"),
        "scaled_dot": _plan_unsupported("its operands are quantized already"),
        **dict.fromkeys(_MXJAX, _plan_unsupported("it is a product of mxjax already")),
    }


def _plan_unsupported(why: str) -> Planner:
    def plan(eqn: JaxprEqn, inputs: list[Origin], context: Context) -> Outcome:
        return _outcome(eqn, inputs, context, _find(eqn, inputs[:2], None, context, why))

    return plan


def _outcome(eqn, inputs: list[Origin], context: Context, found: Found | None, run=None) -> Outcome:
    if found is None:
        return plan_other(eqn, inputs, context)
    if found.policy is None:
        return plan_other(eqn, inputs, context)._replace(found=(found,))
    return Outcome(inputs, [DATA], (found,), run)


def _find(eqn, inputs: list[Origin], weight: int | None, context: Context, unfit: str) -> Found | None:
    """Returns a product's policy, or why it has none; None if both operands are constants.

    Args:
      weight: the operand that is the weight; None if there is none, or two.
      unfit: why no policy can run it; empty if one can.
    Raises:
      ValueError: a product in a gradient, or of parameters with different policies.
    """
    if not any(origin.data or origin.paths for origin in inputs):
        return None
    order = (0, 1) if weight is None else (1 - weight, weight)
    operands = tuple(_operand(eqn, i, inputs[i]) for i in order)
    paths = tuple(dict.fromkeys(p for o in inputs if o.is_weight for p in o.paths))
    policy, why = None, unfit
    if weight is not None and not inputs[1 - weight].data:
        weight, why = None, unfit or "no operand is an activation"
    elif weight is None and not unfit:
        why = "both operands are weights" if paths else "neither operand is a weight"
    elif not unfit:
        policy = _policy_of(paths, context)
        why = "" if policy else NO_POLICY
    if policy and context.in_gradient:
        raise ValueError(
            f"transform found a gradient of the weight {quoted(paths, ' + ')} in the function, whose GEMMs "
            "it cannot tell apart; transform the loss alone, jax.grad(mxjax.transform(loss, ...))"
        )
    return Found(context.start, eqn.primitive.name, paths, operands, policy, why, context.in_gradient)


def _policy_of(paths: tuple[str, ...], context: Context) -> Policy | None:
    policies = {path: context.policies[path] for path in paths}
    if len(set(policies.values())) > 1:
        each = ", ".join(f"{path!r}: {policy_name(policy)}" for path, policy in policies.items())
        raise ValueError(
            f"transform found one product of several parameters with different policies, {each}; "
            "give them the same by a rule"
        )
    return policies[paths[0]]


def _operand(eqn: JaxprEqn, i: int, origin: Origin) -> str:
    """Returns the dtype and the shape of an operand; a weight's dtype is that from which it is quantized."""
    array = aval(eqn.invars[i])
    dtype = origin.casts[0] if origin.casts else array.dtype
    return f"{jnp.dtype(dtype).name}{[*array.shape]}".replace(" ", "")


def _unfit_dtypes(eqn: JaxprEqn) -> str:
    known = [jnp.dtype(dtype) for dtype in CASTS]
    dtypes = [
        str(aval(atom).dtype) for atom in (*eqn.invars[:2], *eqn.outvars) if aval(atom).dtype not in known
    ]
    return f"{dtypes[0]} is none of float32, bfloat16, float16" if dtypes else ""


def _unfit_dot_general(eqn: JaxprEqn) -> str:
    (contract, _), _ = eqn.params["dimension_numbers"]
    return _unfit_dtypes(eqn) if contract else "an outer product contracts no axis"


def _unfit_ragged_dot(eqn: JaxprEqn) -> str:
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, _), batch = numbers.dot_dimension_numbers
    x, w = (aval(atom) for atom in eqn.invars[:2])
    fits = not any(batch) and (x.ndim, w.ndim) == (2, 3) and eqn.params["group_offset"] is None
    rows = [*numbers.lhs_ragged_dimensions]
    if not fits or rows == [*numbers.dot_dimension_numbers[0][0]] or len(numbers.rhs_group_dimensions) != 1:
        return "it is not of the form x [m, k], w [g, k, n]"
    return _unfit_dtypes(eqn)


def _options(found: Found | None, x: Any, draw: Draw, implementation: Implementation | None) -> dict:
    """Returns the arguments of mxjax's products that do not depend on the operation."""
    assert found is not None
    assert found.policy is not None
    key = draw.product_key(found.number, x) if found.policy.needs_key else None
    return {"policy": found.policy, "key": key, "implementation": implementation}


def _dot_general(eqn: JaxprEqn, x: Any, w: Any, weight: int, options: dict) -> jax.Array:
    """Returns the product of x and the weight, in the order of the equation's operands.

    Contracted axes are in x's order, as in `mxjax.einsum`: blocks do not depend on who wrote the product.
    """
    contract, batch = eqn.params["dimension_numbers"]
    x_contract, w_contract = zip(
        *sorted(zip(contract[1 - weight], contract[weight], strict=True)), strict=True
    )
    x_batch, w_batch = batch[1 - weight], batch[weight]
    numbers = ((x_contract, w_contract), (tuple(x_batch), tuple(w_batch)))
    dtype = aval(eqn.outvars[0]).dtype
    y = dot_general(x, w, numbers, eqn.params["precision"], dtype, **options)
    if weight == 0:
        first, free = len(x_batch), x.ndim - len(x_contract)
        y = y.transpose(*range(first), *range(free, y.ndim), *range(first, free))
    return with_sharding(y, eqn.params["out_sharding"])


def _ragged_dot(eqn: JaxprEqn, x: Any, w: Any, sizes: Any, options: dict) -> jax.Array:
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    [x_axis], [w_axis] = numbers.dot_dimension_numbers[0]
    [group] = numbers.rhs_group_dimensions
    x = x if x_axis == 1 else x.T
    w = lax.transpose(w, (group, w_axis, 3 - group - w_axis))
    dtype, precision = aval(eqn.outvars[0]).dtype, eqn.params["precision"]
    y = ragged_dot(x, w, sizes, precision=precision, preferred_element_type=dtype, **options)
    return with_sharding(y, eqn.params["out_sharding"])
