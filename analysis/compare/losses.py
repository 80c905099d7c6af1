"""Each group's losses and differences to the baseline in `eval.py compare`, paired by seed."""

import math
from collections.abc import Sequence
from typing import Any

from analysis.compare.runs import Group
from analysis.statistics import DIVERGED, detectable, differences, holm, standard_deviation, t_interval
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
        d = t_interval(pairs)
        found.append(
            {
                "group": group.name,
                "runs": [run.name for run in group.runs],
                "diverged": len(group.runs) - len(good[group.name]),
                "overfitted": sum(run.overfitted for run in group.runs),
                "at": at,
                "loss": t_interval(list(own.values())).mean,
                "sd": standard_deviation(list(own.values())),
                "train_loss": t_interval([run.last_train_loss(at) for run in good[group.name]]).mean,
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
    return [{key: None if _is_nan(value) else value for key, value in row.items()} for row in found]


def statistics_table(found: Sequence[dict[str, Any]], base: str, unit: str) -> str:
    """Returns `statistics_of` as a table."""

    def number(x: float | None, form: str = ".4f") -> str:
        return "" if x is None else format(x, form)

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


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)
