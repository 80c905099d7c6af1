"""The policy of each of a model's layers, resolved from a default and a table of exceptions."""

import dataclasses
import fnmatch
import itertools
import re
from collections.abc import Mapping, Sequence

from mxjax.numerics.scales import ScaleRule
from mxjax.policy.policy import Policy, with_scale_rule

Rules = Sequence[tuple[str, Policy]]
"""(pattern, policy) pairs; see `matching`."""
_SLICE = re.compile(r"(\w+)\[(-?\d+|(?:-?\d+)?:(?:-?\d+)?)\](\..+)")


@dataclasses.dataclass(frozen=True)
class LayerPolicies:
    """The policy of each named layer of a model; hashable, so that it can be a static argument of jit."""

    names: tuple[str, ...]
    policies: tuple[Policy, ...]

    @classmethod
    def of(cls, policies: Mapping[str, Policy]) -> "LayerPolicies":
        """Returns the table of these policies by layer, in their order."""
        return cls(tuple(policies), tuple(policies.values()))

    def __getitem__(self, name: str) -> Policy:
        return self.policies[self.names.index(name)]

    def items(self) -> list[tuple[str, Policy]]:
        """Returns (name, policy) pairs in the model's order."""
        return list(zip(self.names, self.policies, strict=True))

    def __str__(self) -> str:
        """Returns one line for each distinct policy, with its layers; block numbers become ranges."""
        layers: dict[Policy, dict[str, list[int]]] = {}
        for name, policy in self.items():
            _, number, layer = name.split(".", 2) if name.startswith("blocks.") else ("", "", name)
            layers.setdefault(policy, {}).setdefault(layer, []).extend([int(number)] if number else [])
        return "\n".join(
            f"{', '.join(_numbered(layer, blocks) for layer, blocks in found.items())}: {policy}"
            for policy, found in layers.items()
        )

    def with_rules(self, rules: Rules) -> "LayerPolicies":
        """Returns the table with exceptions; of the rules that match a layer the last one holds.

        Raises:
          ValueError: a pattern matches no layer.
        """
        chosen = dict(self.items())
        for pattern, policy in rules:
            chosen |= dict.fromkeys(matching(self.names, pattern), policy)
        return LayerPolicies.of(chosen)

    def with_scale_rule(self, rule: ScaleRule) -> "LayerPolicies":
        """Returns the table with `rule` for every operand in MXFP4.

        Raises:
          ValueError: unknown rule, or no operand of any layer is in MXFP4.
        """
        if not any(policy.has_mxfp4 for policy in self.policies):
            raise ValueError(f"scale rule {rule!r} has no effect: no operand of any layer is in mxfp4")
        changed = (with_scale_rule(p, rule) if p.has_mxfp4 else p for p in self.policies)
        return LayerPolicies(self.names, tuple(changed))


def resolve(names: Sequence[str], default: Policy, rules: Rules = ()) -> LayerPolicies:
    """Returns each layer's policy: that of the last rule whose pattern matches its name, else the default.

    Args:
      names: names of the model's layers, such as "blocks.0.mlp.down".
      default: policy of layers that no rule matches.
      rules: (pattern, policy) pairs; see `matching` for patterns such as "blocks[:2].*".
    Raises:
      ValueError: a pattern matches no layer.
    """
    return LayerPolicies.of(dict.fromkeys(names, default)).with_rules(rules)


def matching(names: Sequence[str], pattern: str) -> list[str]:
    """Returns the names that a pattern matches, at least one.

    Patterns are those of `fnmatch`, e.g. "blocks.*.mlp.*" or "head". After the name of numbered layers,
    brackets select by index or slice, as for Python lists: "blocks[:2].*" is the first two blocks,
    "blocks[-4:].*" the last four, "blocks[-1].mlp.down" one layer. A slice must lie within the layers.

    Raises:
      ValueError: no name matches, or a slice reaches beyond the layers.
    """
    found = _found(names, pattern)
    if not found:
        known = ", ".join(dict.fromkeys(repr(re.sub(r"\.\d+\.", ".*.", name)) for name in names))
        sliced = _SLICE.fullmatch(pattern)
        count = f"; of {sliced[1]} there are {len(_numbers(names, sliced[1]))}" if sliced else ""
        whole = f"; for all within it write {pattern + '.*'!r}" if _found(names, pattern + ".*") else ""
        raise ValueError(f"layer pattern {pattern!r} matches none of {known}{count}{whole}")
    return found


def _found(names: Sequence[str], pattern: str) -> list[str]:
    sliced = _SLICE.fullmatch(pattern)
    return fnmatch.filter(names, pattern) if sliced is None else _in_slice(names, *sliced.groups())


def _in_slice(names: Sequence[str], stack: str, index: str, rest: str) -> list[str]:
    """Returns the names of `stack` whose number `index` selects and whose rest the pattern `rest` matches.

    None are returned if a bound lies beyond them, because such a pattern was meant for a deeper model.
    """
    bounds = [int(bound) if bound else None for bound in index.split(":")]
    if len(bounds) == 1 and bounds[0] is not None:
        bounds.append(bounds[0] + 1 or None)
    numbers = _numbers(names, stack)
    if any(abs(bound) > len(numbers) for bound in bounds if bound is not None):
        return []
    return [
        name
        for number in numbers[slice(*bounds)]
        for name in fnmatch.filter(names, f"{stack}.{number}{rest}")
    ]


def _numbers(names: Sequence[str], stack: str) -> list[int]:
    """Returns the numbers of the layers called `stack`, in ascending order."""
    return sorted({int(m[1]) for name in names if (m := re.match(rf"{stack}\.(\d+)\.", name))})


def _numbered(layer: str, blocks: list[int]) -> str:
    """Returns e.g. "blocks.0-3,7.mlp.down"; layers outside the blocks have no numbers."""
    if not blocks:
        return layer
    groups = itertools.groupby(enumerate(blocks), lambda pair: pair[1] - pair[0])
    runs = [[block for _, block in group] for _, group in groups]
    ranges = ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)
    return f"blocks.{ranges}.{layer}"
