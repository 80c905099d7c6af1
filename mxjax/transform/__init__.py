"""`transform`: a function whose products of weights and activations run in a policy.

`tracing` makes a jaxpr of the function and tells weights from activations, `interpreter` plans what changes
and computes it, and `products` and `control_flow` know JAX's primitives. Whatever is not a
product with a policy is computed as before, bit for bit.
"""

import functools
import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from mxjax.policy.layers import matching
from mxjax.policy.policy import Policy
from mxjax.products.dot import check_key
from mxjax.products.implementations import Implementation
from mxjax.recipes import as_policy
from mxjax.transform import control_flow, products
from mxjax.transform.interpreter import KEEPING, Context, Draw, Plan, evaluate, make_plan
from mxjax.transform.report import Found, Report
from mxjax.transform.tracing import LIBRARIES, Traced, quoted, trace

Rules = Sequence[tuple[str, Policy | str | None]]
"""(pattern, policy) pairs; None leaves products as they are."""


def transform(
    f: Callable[..., Any],
    policy: Policy | str | None,
    rules: Rules = (),
    weights: int = 0,
    *,
    implementation: Implementation | None = None,
) -> "Transformed":
    """Returns f with every product of a weight and an activation in the weight's policy.

        loss = mxjax.transform(loss, "wgrad_hadamard", rules=[("*head*", None)])
        grads = jax.jit(jax.grad(loss))(params, batch)

    A weight is computed from floating-point arrays of argument number `weights` and constants alone: cast,
    transposed, reshaped, sliced, scanned over, gathered, scaled, merged. Everything else is an activation:
    what depends on another argument or on an array that f closes over. Products are found in
    `einsum`, `@`, `dot_general` and `ragged_dot`, also inside `jit`, `scan`, `while_loop`, `cond`, `vmap`,
    `jax.checkpoint`, `shard_map` and custom derivatives. They become `mxjax.dot_general` and
    `mxjax.ragged_dot` with the dtype of the original result, so `jax.grad` of the function runs Dgrad and
    Wgrad in the policy. `report` lists them.

    Casts of a weight between float32, bfloat16 and float16 before its product are skipped: the product
    quantizes the master weight and its gradient is not rounded to the cast's dtype.

    A function with a custom derivative that holds such a product is differentiated through, its rule is not
    used. A rule of `transform` that leaves its weights alone keeps it.

    Left alone, with the reason in the report: products of two activations, such as attention's, or of two
    weights, outer products, convolutions, operands in other dtypes, also float64, which `dot` would round to
    float32, and products inside primitives that `transform` does not look into, such as `pallas_call`.
    Everything else is computed as before, with its custom derivatives and kernels.

    Args:
      f: a function of arrays and pytrees of them that computes no gradients itself; usually the loss. A
        gradient in it raises an error if a product of it has a weight, and a warning otherwise. Products of
        tangents in a `jax.jvp` are products like others. What f writes into the argument of the weights and
        does not return is lost, with a warning. Leaves that are no arrays are static. Equinox modules,
        `nnx.State`, and parameters of Linen and Haiku are pytrees.
      policy: a `Policy`, its name, or None, which leaves products as they are.
      rules: (pattern, policy) pairs, the last that matches a weight's dotted path counts. For patterns, see
        `mxjax.policy.layers.matching`. Paths are those in the argument, such as "params.Dense_0.kernel" or
        "layers.0.weight".
      weights: number of the positional argument that holds the parameters.
      implementation: see `dot` and `ragged_dot`.
    Returns:
      a function with f's arguments and `mxjax_key=`, a JAX key, which policies that draw random bits need.
      Product n of the report draws from `fold_in(key, n)`, folded with the indices of the loops around it,
      the outermost first, then with `jax.lax.axis_index` of mesh axes of `shard_map` that its activation
      varies over. The same key draws the same bits: fold in the step, or every step rounds alike.
    Raises:
      TypeError: f is not callable, or holds arrays itself, a rule is no pair, or weights is no number. Others
        as in `dot`, when the function is called or reports.
      ValueError: an unknown policy; when called, no product at all, a rule that matches no parameter, a rule
        with a policy that matches no product's weight, a product of several parameters with different
        policies, a gradient that f computes, or a missing key.
    """
    pairs = list(rules)
    _check_arguments(f, rules, pairs, weights)
    resolved = tuple((pattern, _resolve(policy)) for pattern, policy in pairs)
    return Transformed(f, _resolve(policy), resolved, weights, implementation)


def _check_arguments(f: object, rules: object, pairs: list[Any], weights: object) -> None:
    """Raises TypeError for arguments of `transform` of other kinds than it takes."""
    if not callable(f):
        raise TypeError(
            f"transform needs a function, got {type(f).__name__}; pass, for example, loss(params, batch)"
        )
    if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(f)):
        raise TypeError(
            "transform needs a function of the parameters, and f holds arrays itself; write "
            "transform(lambda model, x: model(x), policy)(model, x)"
        )
    if not all(isinstance(rule, tuple | list) and len(rule) == 2 for rule in pairs):
        raise TypeError(
            f"transform needs rules of (pattern, policy) pairs, got {rules!r}; write [('*head*', None)]"
        )
    if not isinstance(weights, int) or weights < 0:
        raise TypeError(
            f"transform needs weights to be an argument's number, counted from 0, got {weights!r}"
        )


def _first_left_alone(found: Sequence[Found]) -> str:
    """Returns why the first product was left alone, if any was found."""
    return f"; it left {len(found)} alone, the first, {found[0].operation}: {found[0].why}" if found else ""


def _resolve(policy: Policy | str | None) -> Policy | None:
    return None if policy is None else as_policy(policy)


def _with_key(f: Callable[..., Any]) -> inspect.Signature:
    """Returns f's signature with `mxjax_key`: jax.jit and Equinox look arguments up there."""
    try:
        signature = inspect.signature(f)
    except ValueError:  # of a function in C
        signature = inspect.signature(lambda *args, **kwargs: None)
    parameters = [p for p in signature.parameters.values() if p.name != "mxjax_key"]
    at = len(parameters) - (bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
    key = inspect.Parameter("mxjax_key", inspect.Parameter.KEYWORD_ONLY, default=None)
    return signature.replace(parameters=[*parameters[:at], key, *parameters[at:]])


class Transformed:
    """The function that `transform` returns."""

    def __init__(
        self,
        f: Callable[..., Any],
        policy: Policy | None,
        rules: Sequence[tuple[str, Policy | None]],
        weights: int,
        implementation: Implementation | None,
    ):
        self._f, self._policy, self._rules, self._weights = f, policy, rules, weights
        self._planners = control_flow.PLANNERS | KEEPING | products.planners(implementation)
        functools.update_wrapper(self, f, updated=())
        self.__signature__ = _with_key(f)

    def __repr__(self) -> str:
        return f"<mxjax.transform of {self._f!r}>"

    def __call__(self, *args: Any, mxjax_key: jax.Array | None = None, **kwargs: Any) -> Any:
        """Returns f(*args, **kwargs), with products in their policies."""
        traced = self._trace(args, kwargs)
        plan = self._plan(traced)
        if self._policy is not None and not any(f.is_product for f in plan.found):
            if not any(origin.is_weight for origin in traced.origins):
                raise ValueError(
                    f"transform needs floating-point arrays in argument {self._weights}, got none in a "
                    f"{type(args[self._weights]).__name__}; pass a pytree of them, such as nnx.state(model) "
                    "or a part from nnx.split of an NNX module with pytree=False"
                )
            raise ValueError(
                f"transform found no product of an activation and a weight from argument {self._weights}"
                f"{_first_left_alone(plan.found)}; weights= is the argument's number, and report() lists all"
            )
        if plan.changes and (inside := next((f for f in plan.found if f.in_gradient), None)):
            warnings.warn(
                f"transform leaves product {inside.number} of the report alone, in a gradient that the "
                "function computes itself; if that is a weight's, transform the loss alone, "
                "jax.grad(mxjax.transform(loss, ...))",
                skip_file_prefixes=LIBRARIES,
            )
        if plan.draws:
            self._check_key(plan, mxjax_key)
        return traced.results_of(evaluate(plan, traced.arrays, Draw(mxjax_key)))

    def report(self, *args: Any, mxjax_key: jax.Array | None = None, **kwargs: Any) -> Report:
        """Returns the products that f has for these arguments; arrays may be `jax.ShapeDtypeStruct`.

        It takes the arguments of the call; the key changes nothing in it.
        """
        del mxjax_key
        return Report(self._plan(self._trace(args, kwargs)).found)

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        try:
            return trace(self._f, self._weights, args, kwargs)
        except TypeError as error:
            if "key" not in kwargs or "unexpected keyword argument 'key'" not in str(error):
                raise
            raise TypeError(f"{error}; the key of transform's policies is mxjax_key=") from error

    @staticmethod
    def _check_key(plan: Plan, key: object) -> None:
        first = next(f for f in plan.found if f.policy is not None and f.policy.needs_key)
        if key is None:
            raise ValueError(
                f"the policy of the weight {quoted(first.paths, ' + ')} draws random bits and needs "
                "mxjax_key=; pass jax.random.key(0), folded with the step"
            )
        assert first.policy is not None
        check_key(first.policy, key)

    def _plan(self, traced: Traced) -> Plan:
        names = [path for origin in traced.origins for path in origin.paths]
        matched = [(pattern, policy, matching(names, pattern)) for pattern, policy in self._rules]
        policies = dict.fromkeys(names, self._policy)
        for _, policy, paths in matched:
            policies |= dict.fromkeys(paths, policy)

        def plan(deferred: Iterable[str]) -> Plan:
            context = Context(policies, frozenset(deferred), self._planners)
            return make_plan(traced.jaxpr, traced.origins, context)

        # The first plan finds the parameters of products: only their casts are deferred.
        found = plan(path for path, policy in policies.items() if policy is not None).found
        multiplied = {path for f in found if f.is_product for path in f.paths}
        for pattern, policy, paths in matched:
            if policy is not None and multiplied.isdisjoint(paths):
                known = quoted(dict.fromkeys(re.sub(r"\d+", "*", path) for path in multiplied)) or "none"
                raise ValueError(
                    f"the rule {pattern!r} of transform matches {quoted(paths)}, which no product with an "
                    f"activation has as its weight; the products' weights are {known}"
                )
        return plan(path for f in found if f.policy is not None for path in f.paths)
