"""Each group's losses in `eval.py compare` beside the baseline's, paired by seed, in nats and in tokens."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.compare.runs import Group, same_but_for_length
from analysis.statistics import (
    DIVERGED,
    SHARE,
    Curve,
    Estimate,
    LogRatio,
    detectable,
    differences,
    effective_multiple,
    holm,
    log_ratios,
    log_ratios_to,
    over_seeds,
    standard_deviation,
    t_interval,
)
from training.log.display import text_table


def statistics_of(groups: Sequence[Group], base: Group) -> list[dict[str, Any]]:
    """Returns each group's losses and its difference to `base`, paired by seed.

    All losses are of the last evaluation that every run has that did not diverge, so that runs of different
    length can be compared. Intervals are 95 % t-intervals; p is corrected by Holm over the groups. What so
    few runs do not give, such as the interval of one, is None.
    """
    good = {group.name: [run for run in group.runs if not run.diverged] for group in groups}
    points = [set(run.validation) for runs in good.values() for run in runs]
    common = set.intersection(*points) if points else set()
    at = max(common, default=None)
    losses = {
        name: {run.config.seed: run.validation[at] for run in runs} if at is not None else {}
        for name, runs in good.items()
    }
    found = []
    for group in groups:
        own = losses[group.name]
        pairs = differences(own, losses[base.name]) if group is not base else []
        d, ends = t_interval(pairs), [run.last_mean("loss", at) for run in good[group.name]]
        found.append(
            {
                "group": group.name,
                "runs": [run.name for run in group.runs],
                "diverged": len(group.runs) - len(good[group.name]),
                "overfitted": sum(run.overfitted for run in group.runs),
                "at": at,
                "loss": t_interval(list(own.values())).mean,
                "sd": standard_deviation(list(own.values())),
                "train_loss": t_interval([math.nan if x is None else x for x in ends]).mean,
                "difference": d.mean,
                "low": d.low,
                "high": d.high,
                "p": d.p,
                "pairs": d.n,
                "detectable": detectable(standard_deviation(pairs), len(pairs)),
            }
        )
    for row, p in zip(found, holm([row["p"] for row in found]), strict=True):
        row["p"] = p

    def known(value: Any) -> Any:
        return None if isinstance(value, float) and math.isnan(value) else value

    return [{key: known(value) for key, value in row.items()} for row in found]


def number(x: float | None, form: str = ".4f") -> str:
    """Returns a number as tables have it, nothing for None."""
    return "" if x is None else format(x, form)


def statistics_table(found: Sequence[dict[str, Any]], base: str, unit: str) -> str:
    """Returns `statistics_of` as a table."""
    rows = []
    for row in found:
        between = "" if row["low"] is None else f"{row['low']:+.4f} to {row['high']:+.4f}"
        numbers = [number(row[key]) for key in ("loss", "sd", "train_loss")]
        rows.append(
            [
                row["group"],
                str(len(row["runs"])),
                str(row["diverged"] or ""),
                str(row["overfitted"] or ""),
                *numbers,
                number(row["difference"], "+.4f"),
                between,
                number(row["p"], ".2g"),
                number(row["detectable"]),
            ]
        )
    at = found[0]["at"]
    columns = ["", "runs", "diverged", "overfitted", "loss", "sd", "train loss"]
    header = [*columns, f"- {base}", "95 %", "p (Holm)", "detectable"]
    filled = [i for i in range(len(header)) if i < 2 or any(row[i] for row in rows)]
    left = any(len(row["runs"]) > row["diverged"] for row in found)
    without = "the runs share no evaluation" if left else "every run has diverged"
    lines = [f"after {at:,} {unit}" if at is not None else without]
    lines.append(text_table([header[i] for i in filled], [[row[i] for i in filled] for row in rows]))
    if at is not None and max(len(row["runs"]) for row in found) < 2:
        lines.append("one seed each: no intervals; train more with --seed")
    if any(row["diverged"] or row["overfitted"] for row in found):
        lines.append(
            f"diverged, and left out: not finite, or the last evaluation is {DIVERGED:g} above the lowest; "
            "overfitted: likewise, but training ends below the lowest evaluation"
        )
    return "\n".join(lines)


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
        row["overhead"] = _over_seeds(log_ratios(ours, ended))
        if target is not None:
            row["to_target"] = _over_seeds(log_ratios_to(target, ours, theirs))
        if lengths and steps in finals:
            multiples = {length / steps: losses for length, losses in finals.items()}
            row["effective"] = _inverse(effective_multiple(_finals(group), multiples), multiples)
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


def _curves(group: Group) -> Mapping[int, Curve]:
    """Returns the evaluations of each seed's run; none of one that diverged."""
    return {r.config.seed: [] if r.diverged else sorted(r.validation.items()) for r in group.runs}


def _finals(group: Group) -> dict[int, float]:
    """Returns the last loss of each run that has ended and has not diverged, by seed."""
    ended = [run for run in group.runs if run.has_ended and not run.diverged]
    return {run.config.seed: run.validation[max(run.validation)] for run in ended}


def _over_seeds(ratios: Mapping[int, LogRatio]) -> dict[str, Any] | None:
    over = over_seeds(list(ratios.values()))
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
