"""`Report`: the products that `mxjax.transform` found in a function, and what becomes of each."""

import dataclasses

from mxjax.policy import Policy
from mxjax.recipes import policies

NO_POLICY = "its policy is None"


@dataclasses.dataclass(frozen=True)
class Found:
    """An operation that multiplies matrices, or may.

    Attributes:
      number: its place among all that were found, in the program's order; keys are folded by it.
      operation: JAX's name of it, such as "dot_general".
      paths: dotted paths of the parameters that its weight is computed from; empty if it has no weight.
      operands: dtypes and shapes of its operands: of the activation and the weight, if it has one. Inside
        `shard_map` shapes are a shard's.
      policy: the policy that it runs in. None: it is left alone.
      why: why it is left alone, or what else changes.
    """

    number: int
    operation: str
    paths: tuple[str, ...]
    operands: tuple[str, ...]
    policy: Policy | None
    why: str = ""

    @property
    def is_product(self) -> bool:
        """Whether it is a product of a weight and an activation, in a policy or not."""
        return self.policy is not None or self.why == NO_POLICY

    def __str__(self) -> str:
        path = " + ".join(self.paths) or "no weight"
        why = f": {self.why}" if self.why else ""
        return f"{self.number:3} {path}  {self.operation} {' x '.join(self.operands)}{why}"


@dataclasses.dataclass(frozen=True)
class Report:
    """All products of a function, in the program's order; `str` lists them by policy.

    A product in a loop, or in a function that is mapped, is one.
    """

    found: tuple[Found, ...]

    @property
    def products(self) -> tuple[Found, ...]:
        """The products that run in a policy."""
        return tuple(f for f in self.found if f.policy is not None)

    @property
    def left_alone(self) -> tuple[Found, ...]:
        """The products that stay as they are."""
        return tuple(f for f in self.found if f.policy is None)

    def __str__(self) -> str:
        groups: dict[str, list[Found]] = {}
        for f in self.products:
            groups.setdefault(policy_name(f.policy), []).append(f)
        lines = [f"{len(self.products)} products in a policy, {len(self.left_alone)} left alone"]
        for name, found in [*groups.items(), ("left alone", list(self.left_alone))]:
            lines += [name, *map(str, found)] if found else []
        return "\n".join(lines)


def policy_name(policy: Policy | None) -> str:
    """Returns the name of a policy, or its description if it has none."""
    return next((name for name, named in policies().items() if named == policy), str(policy))
