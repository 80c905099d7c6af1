"""Named policies: the paper's ladder and published FP4 training recipes, as data.

The ladder (arXiv 2605.09825) quantizes one more GEMM to MXFP4 at each rung; the others stay in FP8. Names are
`stage[_intervention]`: `wgrad_X` applies X to the two Wgrad operands only, `full_X` to all six. X is `sr`
(stochastic rounding), `rht` (H16 with signs redrawn at every call), `hadamard` (deterministic H16) or
`hadamard32`.

    python -m mxjax.recipes [NAME ...]

prints policies operand by operand and recipes of whole runs by their flags, with their sources.
"""

import difflib
from collections.abc import Iterator, Mapping

from mxjax.numerics.formats import FORMATS
from mxjax.policy.policy import OPERANDS, Policy
from mxjax.recipes.ladder import ladder
from mxjax.recipes.nvfp4 import nvfp4
from mxjax.recipes.published import amazon, estimators, published
from mxjax.recipes.whole_runs import RECIPES


class _Policies(Mapping[str, Policy]):
    """The named policies, read-only; its `repr` is the names."""

    def __init__(self, named: Mapping[str, Policy]):
        self._named = dict(named)

    def __getitem__(self, name: str) -> Policy:
        return self._named[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)

    def __repr__(self) -> str:
        return f"<{len(self)} policies: {', '.join(self)}>"


_SOURCES = {
    **dict.fromkeys(ladder(), "arXiv 2605.09825 (the ladder)"),
    "fp8_delayed": "NVIDIA/TransformerEngine at d0067d0, DelayedScaling",
    **dict.fromkeys(amazon(), "arXiv 2502.20586"),
    "tetrajet": "arXiv 2502.20853",
    "nvfp4": "arXiv 2509.25149",
    "nvfp4_te": "arXiv 2509.25149, TransformerEngine's signs",
    "nvfp4_unclipped": "arXiv 2509.25149, block scales of dy 17/16 as large (arXiv 2601.22813, section 3)",
    "fp4_all_the_way": "arXiv 2505.19115",
    "four_over_six": "arXiv 2512.02010",
    "four_over_six_mae": "arXiv 2512.02010, errors as in TransformerEngine",
    "ue5m3": "arXiv 2609.02846, tensor scale of the current tensor",
    "ue5m3_no_tensor_scale": "arXiv 2609.02846, without its tensor scale",
    "quartet2": "arXiv 2601.22813",
    "tetrajet_v2": "arXiv 2510.27527, its GEMMs",
    "averis": "arXiv 2603.10444, with the mean in float32",
    "ms_fp4": "arXiv 2501.17116",
    "ms_fp4_clip": "Azure/MS-AMP, for arXiv 2501.17116",
    "quartet": "arXiv 2505.14669",
    "uniform4": "arXiv 2606.20381, in MX blocks",
    "uniform4_fp32": "arXiv 2606.20381",
    "chmiel_mx": "arXiv 2112.10769, in MX blocks",
    "primus_turbo": "AMD-AGI/Primus-Turbo at a6a16cd",
    "lumen": "DaiXindi-AMD/Lumen at 0109d35",
    "lumen_dequantized": "DaiXindi-AMD/Lumen at deaccb4, as it was until August 2026",
    "weight_only": "MXFP4 weights, straight-through gradients (arXiv 1308.3432)",
    "mxfp4_fp8_backward": "MXFP4 forward and MXFP8 backward, of no publication that we know",
}
_POLICIES = _Policies(ladder() | amazon() | published() | nvfp4() | estimators())


def policies() -> Mapping[str, Policy]:
    """Returns every named policy, the paper's ladder first."""
    return _POLICIES


def source(name: str) -> str:
    """Returns where the policy called `name` was published.

    Raises:
      ValueError: unknown name.
    """
    get_policy(name)
    return _SOURCES[name]


def describe(policy: Policy) -> str:
    """Returns a policy operand by operand: one line for each GEMM, with the rotation of both operands."""
    width = max(28, *(len(str(o)) for g in policy.gemms.values() for o in (g.lhs, g.rhs)))
    lines: list[str] = []
    for gemm, (lhs, rhs) in OPERANDS.items():
        g = policy.gemms[gemm]
        line = f"{gemm}  {lhs:2} {g.lhs!s:{width}} {rhs:2} {g.rhs!s:{width}} {g.rotation or ''}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def get_policy(name: str) -> Policy:
    """Returns the policy called `name`, e.g. "wgrad_hadamard".

    Raises:
      TypeError: `name` is no string; a `Policy` is used as it is.
      ValueError: a recipe of a whole run, or an unknown name; the message suggests the closest.
    """
    if not isinstance(name, str):
        raise TypeError(f"get_policy needs a name, got {type(name).__name__}; a Policy is used as it is")
    if name in _POLICIES:
        return _POLICIES[name]
    if name in RECIPES:
        raise ValueError(
            f"{name} is a recipe of a whole run: give it alone to train.py --policy; its policy is "
            f"{RECIPES[name].policy!r}"
        )
    if name in FORMATS:
        having = [
            n
            for n, p in _POLICIES.items()
            if any(name in (g.lhs.format, g.rhs.format) for g in p.gemms.values())
        ]
        example = f"policies with it are {', '.join(having[:3])}" if having else "no named policy has it"
        raise ValueError(f"unknown policy {name!r}: it is a format; {example}")
    if name.endswith(".json"):
        raise ValueError(f"unknown policy {name!r}: it is a file; read it by mxjax.policy_from_json(text)")
    close = difflib.get_close_matches(name.lower(), [*_POLICIES, *RECIPES], n=3)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    raise ValueError(f"unknown policy {name!r}; {hint}`python -m mxjax.recipes` lists all")


def as_policy(policy: Policy | str) -> Policy:
    """Returns the policy, looked up if given by name.

    Raises:
      TypeError: neither a policy nor a name.
      ValueError: unknown name.
    """
    if isinstance(policy, str):
        return get_policy(policy)
    if not isinstance(policy, Policy):
        raise TypeError(f"policy must be an mxjax.Policy or a name, got {type(policy).__name__}")
    return policy
