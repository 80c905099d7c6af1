"""The tables of a diagnosis, as Markdown, and how well its statistics predict final losses."""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from analysis.statistics import paired_difference, rank_correlation
from benchmarks.study.cells import MAIN_PROTOCOLS, UNIFORM, WGRAD_ONLY
from benchmarks.study.laws import families
from benchmarks.study.results import CellResult, baseline, by_group
from benchmarks.study.tables import interval, number, with_interval
from mxjax.runtime.tables import table

STATISTICS = {
    "error": "relative error",
    "repeating_share": "share that repeats",
    "along": "repeating error along the gradient",
    "across": "repeating error across the gradient",
    "gradient_over_noise": "gradient over sqrt(3) noise",
}
OF_CELLS = STATISTICS | {
    "loss": "loss beyond bf16's",
    "descent": "descent of a normalized step",
    "descent_for_length": "for its length",
}
"""The statistics of whole gradients by cell; older records have the first few."""
FAR = ("amazon", "full_sr", WGRAD_ONLY, UNIFORM)
"""How the names of policies at the ends begin: they have the smallest and largest errors, and losses."""
_WITHOUT_FAR = "without amazon, full_sr, Wgrad alone and the uniform grid"
LEAST_CELLS = 5
"""The smallest number of cells for which a rank correlation is shown."""


def variants_table(record: Mapping[str, Any] | None) -> str:
    """Returns the split of Wgrad's error by rounding, rotation and rule."""
    return _split_table("Wgrad", "wgrad", record)


def compared_table(record: Mapping[str, Any] | None) -> str:
    """Returns each variant of Wgrad beside rounding to nearest with the same rule."""
    if record is None or "compared" not in record:
        return "Not measured yet."
    rows = []
    for name, parts in record["compared"].items():
        ratio, repeating = parts["log_ratio"], parts["repeating"]
        low, high = math.exp(ratio["low"]), math.exp(ratio["high"])
        rows.append(
            [
                name,
                number(math.exp(ratio["mean"]), ".3f"),
                interval(low, high, ".3f"),
                number(repeating["mean"], "+.4f"),
                interval(repeating["low"], repeating["high"]),
            ]
        )
    return table("Wgrad | error over nearest's | 95 % | repeating energy minus nearest's | 95 %", rows)


def cells_table(record: Mapping[str, Any] | None) -> str:
    """Returns the split of whole gradients' errors by cell."""
    return _split_table("policy, rules", "cells", record)


def own_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns the relative errors of cells on checkpoints that several policies trained."""
    if not records:
        return "Not measured yet."
    common = [name for name in records[0]["cells"] if all(name in record["cells"] for record in records)]
    rows = [
        [f"{record['policy']}, step {record['step']}"]
        + [_estimate("error", record["cells"][name]["error"]) for name in common]
        for record in records
    ]
    return table(" | ".join(["trained in", *common]), rows)


def _split_table(heading: str, part: str, record: Mapping[str, Any] | None) -> str:
    if record is None:
        return "Not measured yet."
    splits, shown = record[part], _measured(record[part])
    rows = [[name, *(_estimate(key, split[key]) for key in shown)] for name, split in splits.items()]
    return source_of(record) + "\n\n" + table(" | ".join([heading, *shown.values()]), rows)


def _measured(splits: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Returns the names of the statistics that all splits have."""
    return {key: name for key, name in OF_CELLS.items() if all(key in split for split in splits.values())}


def prediction(
    cells: Mapping[str, CellResult],
    record: Mapping[str, Any] | None,
    shown: Mapping[str, str] | None = None,
    protocols: Collection[str] = MAIN_PROTOCOLS,
) -> str:
    """Returns the rank correlation of each statistic with the final loss minus fp8's, by group of cells.

    Each stands beside the same without the policies FAR, on which it may hang, and among the cells that
    differ in Wgrad alone, as differences from the means of their families. Losses are paired by seed.

    Args:
      shown: names of the statistics by key; default, those of OF_CELLS.
      protocols: of the groups.
    """
    if record is None:
        return "Not measured yet."
    shown = shown or _measured(record["cells"])
    parts = []
    for (model, protocol), group in by_group(dict(cells)).items():
        base = baseline(group)
        known = [c for c in group if c is not base and c.losses and c.label in record["cells"]]
        if protocol not in protocols or base is None or not known:
            continue
        if any(run["parameters"] != record["parameters"] for run in base.runs.values()):
            continue
        if len(known) < LEAST_CELLS:
            names = ", ".join(f"`{cell.label}`" for cell in known)
            parts.append(
                f"`{model}`, protocol `{protocol}`: {len(known)} cells have run ({names}); "
                f"a rank correlation needs at least {LEAST_CELLS}."
            )
            continue
        near = [cell for cell in known if not cell.policy.startswith(FAR)]
        every = {"": known}, {"": near}, families(known)
        rows = [
            [name, *(_correlation(key, groups, base, record) for groups in every)]
            for key, name in shown.items()
        ]
        header = f"{model}, {protocol}: statistic | all | {_WITHOUT_FAR} | those that differ in Wgrad"
        parts.append(table(header, rows))
    return "\n\n".join(parts)


def _correlation(
    key: str, groups: Mapping[str, Sequence[CellResult]], base: CellResult, record: Mapping[str, Any]
) -> str:
    """Returns the rank correlation of a statistic with the losses within groups of cells, in words."""
    if sum(map(len, groups.values())) < LEAST_CELLS:
        return "-"
    found, gaps = [], []
    for cells in filter(None, groups.values()):
        found += _centred([record["cells"][cell.label][key]["mean"] for cell in cells])
        gaps += _centred([paired_difference(cell.losses, base.losses).mean for cell in cells])
    r = rank_correlation(found, gaps)
    if math.isnan(r.mean):
        return "-"
    return f"{with_interval(r, '+.2f')}, p {number(r.p, '.2g')}, {r.n} cells"


def _centred(values: Sequence[float]) -> list[float]:
    shifted = [value - values[0] for value in values]  # equal values give zeros, without rounding
    mean = statistics.fmean(shifted)
    return [value - mean for value in shifted]


def source_of(record: Mapping[str, Any]) -> str:
    """Returns the model, batches, commit and device of a record, as a sentence."""
    tokens = record["tokens"] // record["batches"]
    return (
        f"{record['parameters']:,} parameters, trained in `{record['policy']}`, step {record['step']}; "
        f"{record['batches']} batches of {tokens:,} tokens; commit {record['commit'][:7]}, "
        f"{record['versions']['device']}."
    )


def _estimate(key: str, e: Mapping[str, float]) -> str:
    if key == "across" and e["mean"] == 0:  # its square came out negative
        return "not resolved"
    half = (e["high"] - e["low"]) / 2
    return number(e["mean"]) + ("" if math.isnan(half) or half == 0 else f" ± {half:.4f}")
