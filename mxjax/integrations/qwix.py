"""A qwix provider: rules choose by module path which products of a Flax model run by an mxjax policy.

`qwix.quantize_model` replaces the products that a model calls, in Linen and in NNX, so that the model's
source does not change. MaxText, Tunix and bonsai take such providers. A product runs by a policy only if one
of its operands is a parameter of the module that calls it; products of two activations stay as they are.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer, Shaped

from mxjax.policy.policy import Policy
from mxjax.products.dot import DimensionNumbers
from mxjax.products.dot_general import Side, is_linear, make_dot_general
from mxjax.products.einsum import einsum
from mxjax.products.implementations import Implementation
from mxjax.products.ragged import ragged_dot
from mxjax.recipes import as_policy

try:
    import qwix
    from qwix._src.utils import flax_util  # it finds parameters; qwix has no public name for that
except ImportError as error:
    raise ImportError(
        "mxjax.integrations.qwix needs qwix; in a checkout of mxjax, pip install -e '.[integrations]'"
    ) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyRule(qwix.QuantizationRule):
    """The policy of the products that a rule of qwix matches.

    Attributes:
      module_path: regular expression that matches the whole path of a module, such as "decoder/.*layers.*".
      op_names: names among "dot_general", "einsum" and "ragged_dot"; empty for all.
      policy: a `Policy`, its name, or None to leave the products as they are.
    """

    policy: Policy | str | None = None


class Provider(qwix.QuantizationProvider):
    """Runs a model's products by mxjax's policies: `qwix.quantize_model(model, Provider(rules), ...)`.

    The first rule that matches decides; products that none matches stay as they are. Policies that draw
    random bits take keys from the stream "mxjax". In Linen: `model.apply(..., rngs={"mxjax": key})`. In NNX:
    `quantize_model(..., rngs=nnx.Rngs(mxjax=0))`, then `model.set_attributes(qwix_rngs=nnx.Rngs(mxjax=1))`.

    Attributes:
      products: what each product was when the model last ran, by "PATH: OPERATION": the policy, or why it
        has none.

    Args:
      rules: the rules, in the order of precedence.
      implementation: see `mxjax.dot`.
    Raises:
      TypeError: a rule is not a `PolicyRule`.
      ValueError: an unknown policy; where the model runs, a product of two parameters, or no stream of keys.
    """

    def __init__(self, rules: Sequence[PolicyRule], *, implementation: Implementation | None = None):
        super().__init__(rules)
        self.implementation: Implementation | None = implementation
        self.products: dict[str, str] = {}

    def _init_rule(self, rule: qwix.QuantizationRule) -> PolicyRule:
        if not isinstance(rule, PolicyRule):
            raise TypeError(
                f"Provider needs PolicyRule, got {type(rule).__name__}; its dtypes have no policy"
            )
        if rule.weight_qtype is not None or rule.act_qtype is not None:
            raise ValueError(f"PolicyRule takes a policy, not dtypes of qwix: {rule}")
        return rule if rule.policy is None else dataclasses.replace(rule, policy=as_policy(rule.policy))

    def get_intercept_map(self) -> dict[str, Callable[..., Any]]:
        """Returns the functions that stand in for JAX's while the model runs."""
        return super().get_intercept_map() | {
            "jax.lax.dot_general": self.dot_general,
            "jax.numpy.einsum": self.einsum,
            "jax.lax.ragged_dot": self.ragged_dot,
        }

    def dot_general(
        self,
        lhs: Shaped[Array, "..."],
        rhs: Shaped[Array, "..."],
        dimension_numbers: DimensionNumbers,
        precision: lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: Any = None,
    ) -> Float[Array, "..."]:
        """Returns `jax.lax.dot_general`, by a policy if a rule matches and an operand is a parameter."""
        linear = is_linear(lhs, dimension_numbers)
        policy, weight = self._choose("dot_general", lhs, rhs, "rhs" if linear else None)
        arguments = dimension_numbers, precision, preferred_element_type, out_sharding
        if policy is None:
            return lax.dot_general(lhs, rhs, *arguments[:3], out_sharding=out_sharding)
        settings = {"key": _key(policy), "implementation": self.implementation, "weight": weight}
        return make_dot_general(policy, **settings)(lhs, rhs, *arguments)

    def einsum(self, spec: str, /, *operands: Shaped[Array, "..."], **options: Any) -> Shaped[Array, "..."]:
        """Returns `jnp.einsum`, by a policy if a rule matches and one of two operands is a parameter."""
        policy, weight = self._choose("einsum", *operands) if len(operands) == 2 else (None, None)
        if policy is None:
            return jnp.einsum(spec, *operands, **options)
        unknown = {k for k, v in options.items() if v is not None} - {"precision", "preferred_element_type"}
        if unknown - {"optimize"}:
            raise NotImplementedError(
                f"mxjax has no einsum with {', '.join(sorted(unknown))}; use a rule without"
            )
        x, w = operands
        if weight == "lhs":
            inputs, arrow, result = spec.partition("->")
            x, w, spec = w, x, ",".join(inputs.split(",")[::-1]) + arrow + result
        taken = {k: options.get(k) for k in ("precision", "preferred_element_type")}
        return einsum(
            spec, x, w, policy=policy, key=_key(policy), implementation=self.implementation, **taken
        )

    def ragged_dot(
        self,
        lhs: Shaped[Array, "m k"],
        rhs: Shaped[Array, "g k n"],
        group_sizes: Integer[Array, " g"],
        precision: lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        group_offset: Array | None = None,
    ) -> Float[Array, "m n"]:
        """Returns `jax.lax.ragged_dot`, by a policy if a rule matches."""
        policy, _ = self._choose("ragged_dot", lhs, rhs, "rhs")
        options = {"precision": precision, "preferred_element_type": preferred_element_type}
        if policy is None:
            return lax.ragged_dot(lhs, rhs, group_sizes, group_offset=group_offset, **options)
        if group_offset is not None:
            raise NotImplementedError("mxjax.ragged_dot has no group_offset; use a rule without ragged_dot")
        settings = {"key": _key(policy), "implementation": self.implementation}
        return ragged_dot(lhs, rhs, group_sizes, policy=policy, **settings, **options)

    def _choose(
        self, operation: str, lhs: Array, rhs: Array, likely: Side | None = None
    ) -> tuple[Policy | None, Side | None]:
        """Returns the product's policy and which operand is the weight, or (None, None).

        qwix may take activations of a parameter's shape for the parameter; the weight is then the likely one.
        """
        rule, number = self._get_current_rule_and_op_id(operation)
        name = f"{'/'.join(map(str, flax_util.get_current_module_path()))}: {number}"
        if not isinstance(rule, PolicyRule) or rule.policy is None:
            self.products[name] = "as it is: no rule" if rule is None else "as it is: its rule has no policy"
            return None, None
        names = flax_util.find_param(lhs), flax_util.find_param(rhs)
        if names[0] is not None and names[0] == names[1] and likely is not None:
            names = (None, names[1]) if likely == "rhs" else (names[0], None)
        if None not in names:
            raise ValueError(
                f"{name} multiplies two parameters, {names}; give its module a rule without policy"
            )
        if names == (None, None):
            self.products[name] = "as it is: no operand is a parameter"
            return None, None
        self.products[name] = str(rule.policy)
        return as_policy(rule.policy), "lhs" if names[1] is None else "rhs"


def _key(policy: Policy) -> jax.Array | None:
    """Returns the next key of the module's stream "mxjax" for a policy that draws bits."""
    if not policy.needs_key:
        return None
    try:
        return flax_util.make_rng("mxjax")
    except Exception as error:
        raise ValueError(
            "the policy draws random bits and finds no stream 'mxjax'; in Linen pass rngs={'mxjax': key} to "
            "apply, in NNX pass rngs=nnx.Rngs(mxjax=0) to qwix.quantize_model, then call "
            "model.set_attributes(qwix_rngs=nnx.Rngs(mxjax=1))"
        ) from error
