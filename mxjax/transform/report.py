"""`Report`: the products that `mxjax.transform` found in a function, and what becomes of each."""

import dataclasses

from mxjax.policy.policy import Policy
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
      in_gradient: whether it belongs to a gradient that the function computes itself.
    """

    number: int
    operation: str
    paths: tuple[str, ...]
    operands: tuple[str, ...]
    policy: Policy | None
    why: str = ""
    in_gradient: bool = False

    @property
    def is_product(self) -> bool:
        """Whether it is a product of a weight and an activation, in a policy or not."""
        return self.policy is not None or self.why == NO_POLICY

    @property
    def weight(self) -> str:
        """The weight's paths in words."""
        return " + ".join(self.paths) or "no weight"


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
        for f in (*self.products, *self.left_alone):
            groups.setdefault("left alone" if f.policy is None else policy_name(f.policy), []).append(f)
        width = max((len(f.weight) for f in self.found), default=0)
        count = len(self.products)
        lines = [f"{count} product{'s' * (count != 1)} in a policy, {len(self.left_alone)} left alone"]
        for name, found in groups.items():
            lines.append(name)
            for f in found:
                line = f"{f.number:5}  {f.weight:{width}}  {f.operation} {' x '.join(f.operands)}"
                why = ", ".join(filter(None, (f.why, "in a gradient" if f.in_gradient else "")))
                lines.append(f"{line.rstrip()}{': ' if why else ''}{why}")
        return "\n".join(lines)


def policy_name(policy: Policy | None) -> str:
    """Returns the name of a policy, or its description if it has none."""
    return next((name for name, named in policies().items() if named == policy), str(policy))
