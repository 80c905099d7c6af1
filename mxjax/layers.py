"""Which policy each GEMM of a model runs in: a default and a table of exceptions, resolved layer by layer."""

import dataclasses
import fnmatch
import itertools
import re
from collections.abc import Sequence

from mxjax.policy import Policy, with_scale_rule
from mxjax.recipes import as_policy
from mxjax.scales import ScaleRule

Rules = Sequence[tuple[str, Policy | str]]


@dataclasses.dataclass(frozen=True)
class LayerPolicies:
    """The policy of every named GEMM of a model; hashable, so that it can be a static argument of jit."""

    names: tuple[str, ...]
    policies: tuple[Policy, ...]

    def __getitem__(self, name: str) -> Policy:
        return self.policies[self.names.index(name)]

    def items(self) -> list[tuple[str, Policy]]:
        """Returns (name, policy) of every layer, in the model's order."""
        return list(zip(self.names, self.policies, strict=True))

    def __str__(self) -> str:
        """Every layer's policy, a line for each that differs, with block numbers gathered into ranges."""
        layers: dict[Policy, dict[str, list[int]]] = {}
        for name, policy in self.items():
            _, number, layer = name.split(".", 2) if name.startswith("blocks.") else ("", "", name)
            layers.setdefault(policy, {}).setdefault(layer, []).extend([int(number)] if number else [])
        return "\n".join(
            f"{', '.join(_numbered(layer, blocks) for layer, blocks in found.items())}: {policy}"
            for policy, found in layers.items()
        )

    def with_scale_rule(self, rule: ScaleRule) -> "LayerPolicies":
        """Returns the table with `rule` for every operand in MXFP4.

        Raises:
          ValueError: unknown rule, or no operand of any layer is in MXFP4.
        """
        if not any(policy.has_mxfp4 for policy in self.policies):
            raise ValueError(f"scale rule {rule!r} has no effect: no operand of any layer is in mxfp4")
        changed = (with_scale_rule(p, rule) if p.has_mxfp4 else p for p in self.policies)
        return LayerPolicies(self.names, tuple(changed))


def resolve(names: Sequence[str], default: Policy | str, rules: Rules = ()) -> LayerPolicies:
    """Returns the policy of each layer: the default, or that of the last rule whose pattern matches its name.

    Args:
      names: the model's layers, such as "blocks.0.mlp.down".
      default: a policy or its name.
      rules: (pattern, policy) pairs; patterns as in `fnmatch`, e.g. ("blocks.[01].*", "bf16").
    Raises:
      ValueError: an unknown policy, or a pattern that matches no layer.
    """
    chosen = dict.fromkeys(names, as_policy(default))
    for pattern, policy in rules:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            known = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names)
            raise ValueError(f"layer pattern {pattern!r} matches none of {', '.join(known)}")
        chosen |= dict.fromkeys(matching, as_policy(policy))
    return LayerPolicies(tuple(names), tuple(chosen.values()))


def _numbered(layer: str, blocks: list[int]) -> str:
    """Returns e.g. "blocks.0-3,7.mlp.down"; layers outside the blocks have no numbers."""
    if not blocks:
        return layer
    groups = itertools.groupby(enumerate(blocks), lambda pair: pair[1] - pair[0])
    runs = [[block for _, block in group] for _, group in groups]
    ranges = ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)
    return f"blocks.{ranges}.{layer}"
