"""Losses as tokens in `eval.py compare`: how many more tokens than the baseline each group needs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from analysis import statistics as token_ratios
from analysis.compare.runs import Group, same_but_for_length
from analysis.statistics import SHARE, Estimate
from training.log.display import text_table

MEASURES = {"overhead": f"loss at {100 * SHARE:g} %", "to_target": "target", "effective": "final loss"}
"""What tokens are counted for: the loss that the baseline has at SHARE of its run, the target, and a final
loss, which the baseline has after other lengths of training."""


def lengths_of(groups: Sequence[Group], base: Group) -> list[Group]:
    """Returns the baseline's groups of other lengths, if they count the final losses of another group.

    For that the baseline needs three lengths, and one group for each.
    """
    others = [group for group in groups if group is not base and same_but_for_length(group, base)]
    lengths = {group.runs[0].config.steps for group in others}
    is_counted = len(groups) > len(others) + 1
    return others if is_counted and len(lengths) == len(others) >= 2 else []


def token_statistics(
    groups: Sequence[Group], base: Group, lengths: Sequence[Group], target: float | None
) -> list[dict[str, Any]]:
    """Returns the ratios of tokens of each group but the baseline, by MEASURES; what is not known is None.

    Of "overhead" and "to_target" seeds are paired, and intervals are 95 % t-intervals of the logarithm.
    "effective" needs the baseline in three lengths; its interval is from a jackknife over seeds.

    Args:
      lengths: the baseline's runs of other lengths (`lengths_of`).
    """
    finals = {group.runs[0].config.steps: _finals(group) for group in [base, *lengths]}
    found = []
    for group in groups:
        if group is base:
            continue
        ours, theirs, steps = _curves(group), _curves(base), group.runs[0].config.steps
        ended = {run.config.seed: theirs[run.config.seed] for run in base.runs if run.has_ended}
        row: dict[str, Any] = {"group": group.name} | dict.fromkeys(MEASURES)
        row["overhead"] = _over_seeds(token_ratios.log_ratios(ours, ended))
        if target is not None:
            row["to_target"] = _over_seeds(token_ratios.log_ratios_to(target, ours, theirs))
        if lengths and steps in finals:
            multiples = {length / steps: losses for length, losses in finals.items()}
            row["effective"] = _inverse(token_ratios.effective_multiple(_finals(group), multiples), multiples)
        found.append(row)
    return found


def token_table(found: Sequence[Mapping[str, Any]], base: str, target: float | None, unit: str) -> list[str]:
    """Returns `token_statistics` in lines: a table, and what it says; none if nothing is known."""
    known = [name for name in MEASURES if any(row[name] for row in found)]
    if not known:
        return []
    titles = MEASURES | {"to_target": "" if target is None else f"loss {target:g}"}
    header = ["", *(part for name in known for part in (titles[name], "95 %"))]
    rows = [[row["group"], *(part for name in known for part in _in_words(row[name]))] for row in found]
    lines = ["", f"{unit} beyond {base}'s, in percent", text_table(header, rows)]
    if "overhead" in known:
        lines.append(
            f"{MEASURES['overhead']}: {unit} to the loss of {base} after so much of its run; "
            "arXiv 2605.09825's measure, for rates that hardly decay"
        )
    if "effective" in known:
        lines.append(
            f"{MEASURES['effective']}: {unit} with which {base} ends at the same loss, by its lengths"
        )
    if any((row[name] or {}).get("bound") for row in found for name in known):
        lines.append("> and <: bounds; a run was not evaluated at the loss, or no length ends at it")
    return lines


def _in_words(ratio: Mapping[str, Any] | None) -> tuple[str, str]:
    if ratio is None:
        return "", ""
    percent = f"{ratio['bound']} {100 * (ratio['ratio'] - 1):+.1f}".strip()
    if ratio["low"] is None:
        return percent, ""
    return percent, f"{100 * (ratio['low'] - 1):+.1f} to {100 * (ratio['high'] - 1):+.1f}"


def _curves(group: Group) -> Mapping[int, token_ratios.Curve]:
    """Returns the evaluations of each seed's run; none of one that diverged."""
    return {r.config.seed: [] if r.diverged else sorted(r.validation.items()) for r in group.runs}


def _finals(group: Group) -> dict[int, float]:
    """Returns the last loss of each run that has ended and has not diverged, by seed."""
    ended = [run for run in group.runs if run.has_ended and not run.diverged]
    return {run.config.seed: run.validation[max(run.validation)] for run in ended}


def _over_seeds(ratios: Mapping[int, token_ratios.LogRatio]) -> dict[str, Any] | None:
    over = token_ratios.over_seeds(list(ratios.values()))
    found = _ratio(over.log_ratio, over.bound.strip())
    return found and found | {"not_reached": over.not_reached}


def _inverse(log: Estimate, multiples: Mapping[float, Any]) -> dict[str, Any] | None:
    """Returns the tokens that a group needs, from the log multiple with which the baseline does."""
    if math.isinf(log.mean):
        above = log.mean < 0
        log = log._replace(mean=math.log(min(multiples) if above else max(multiples)))
        return _ratio(log._replace(mean=-log.mean), ">" if above else "<")
    return _ratio(log._replace(mean=-log.mean, low=-log.high, high=-log.low))


def _ratio(log: Estimate, bound: str = "") -> dict[str, Any] | None:
    """Returns a ratio of tokens with its interval, None where there is none; None without a ratio."""
    if math.isnan(log.mean):
        return None
    ratio, low, high = (None if math.isnan(x) else math.exp(x) for x in log[:3])
    p = None if math.isnan(log.p) else log.p
    return {"ratio": ratio, "bound": bound, "low": low, "high": high, "p": p, "pairs": log.n}
