"""Gradient norms, spikes, SQNR and evaluation sets of groups of runs in `eval.py compare`."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from analysis.compare.losses import number
from analysis.compare.runs import Group
from analysis.records import decibels, kinds_of, mean_sqnr
from analysis.runs import LAST
from training.log.display import text_table

FEWEST = 10
"""Steps whose gradient norms make a median; it says little of fewer."""


def health_of(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Returns gradient norms, spikes, SQNR and evaluations of each group; None for a number that no run has.

    "grad_norm" is the median over the last LAST of the steps, at least FEWEST, "largest_grad_norm" the
    largest of all, both without those that are not finite. "spikes" are the steps of each run
    (`training.log.spikes`). "sqnr_db" has the mean decibels of each GEMM over layers and runs at their last
    measurement, "sqnr_db_by_kind" those of each kind of layer, and "eval_sets" the last loss and bits per
    byte of each set, in means over runs.
    """
    found = []
    for group in groups:
        norms = (norm for run in group.runs for norm in run.last_values("grad_norm", fewest=FEWEST))
        ends = [*filter(math.isfinite, norms)]
        largest = [norm for run in group.runs if (norm := run.largest("grad_norm")) is not None]
        measured = [run.sqnr[max(run.sqnr)] for run in group.runs if run.sqnr]
        found.append(
            {
                "group": group.name,
                "grad_norm": statistics.median(ends) if ends else None,
                "largest_grad_norm": max(largest, default=None),
                "spikes": {run.name: [spike.step for spike in run.spikes] for run in group.runs},
                "sqnr_db": _known(mean_sqnr(measured)) if measured else None,
                "sqnr_db_by_kind": {kind: _known(mean_sqnr(measured, kind)) for kind in kinds_of(measured)},
                "eval_sets": _sets(group),
            }
        )
    return found


def _sets(group: Group) -> dict[str, dict[str, float | None]]:
    """Returns the means over the runs of the last evaluation of each set that all of them have."""
    found = {}
    for name in group.runs[0].sets:
        if all(name in run.sets for run in group.runs):
            last = [run.last_of(name) for run in group.runs]
            parts: dict[str, list[Any]] = {
                key: [one.get(key) for one in last] for key in ("eval_loss", _BITS)
            }
            found[name] = {k: None if None in v else math.fsum(v) / len(v) for k, v in parts.items()}
    return found


def _known(numbers: dict[str, float]) -> dict[str, float | None]:
    return {name: None if math.isnan(number) else number for name, number in numbers.items()}


_BITS = "eval_bits_per_byte"


def health_tables(found: Sequence[dict[str, Any]]) -> list[str]:
    """Returns `health_of` in lines; of what no group has there is no table."""
    rows = [
        [
            row["group"],
            number(row["grad_norm"]),
            number(row["largest_grad_norm"]),
            str(sum(map(len, row["spikes"].values()))),
        ]
        for row in found
    ]
    median = f"gradient norm, median of the last {100 * LAST:g} % or {FEWEST} steps"
    header = ["", median, "largest", "spikes"]
    lines = ["", text_table(header, rows)] if any(row["grad_norm"] is not None for row in found) else []
    sets = list(dict.fromkeys(name for row in found for name in row["eval_sets"]))
    if any(sets) or any(one[_BITS] is not None for row in found for one in row["eval_sets"].values()):
        header = ["last evaluation", *(part for name in sets for part in (name or "loss", "bits per byte"))]
        lines += ["", text_table(header, [[row["group"], *_evaluated(row, sets)] for row in found])]
    kinds = list(dict.fromkeys(kind for row in found for kind in row["sqnr_db_by_kind"]))
    if kinds:
        measured = [row for row in found if row["sqnr_db"] is not None]
        parts = [*((kind, [row["sqnr_db_by_kind"].get(kind) for row in measured]) for kind in kinds)]
        parts.append(("all layers", [row["sqnr_db"] for row in measured]))
        rows = [
            [
                name if gemm == "fprop" else "",
                gemm,
                *("" if one is None else decibels(one[gemm]) for one in ones),
            ]
            for name, ones in parts
            for gemm in measured[0]["sqnr_db"]
        ]
        header = ["SQNR in dB", "GEMM", *(row["group"] for row in measured)]
        lines += ["", text_table(header, rows)]
    return lines


def _evaluated(row: dict[str, Any], sets: Sequence[str]) -> list[str]:
    return [number(row["eval_sets"].get(name, {}).get(key)) for name in sets for key in ("eval_loss", _BITS)]
