"""Series by step from a run's metrics.jsonl: numbers of steps, evaluations, SQNR of GEMMs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mxjax.policy import OPERANDS

Record = Mapping[str, Any]
Series = dict[int, float]
"""Numbers by step."""
Sqnr = dict[str, dict[str, float]]
"""Decibels by layer, "blocks.0.mlp.down" and so on, and by GEMM; infinite if exact."""


def series(records: Iterable[Record], name: str) -> Series:
    """Returns a number that lines have, by step."""
    return {record["step"]: record[name] for record in records if name in record}


def evaluations_by_set(records: Iterable[Record]) -> dict[str, dict[int, Record]]:
    """Returns the evaluations of each set, by step; the name of the only set may be empty."""
    found: dict[str, dict[int, Record]] = {}
    for record in records:
        if "eval_loss" in record:
            for name, one in record.get("eval_sets", {"": record}).items():
                found.setdefault(name, {})[record["step"]] = one
    return found


def sqnr_by_step(records: Iterable[Record]) -> dict[int, Sqnr]:
    """Returns the SQNR of every GEMM that --stats-every has measured, by step."""
    return {
        record["step"]: {
            layer: {gemm: measures[gemm]["sqnr_db"] for gemm in OPERANDS}
            for layer, measures in record["layers"].items()
            if all("sqnr_db" in (measures.get(gemm) or {}) for gemm in OPERANDS)  # a router has none
        }
        for record in records
        if "layers" in record
    }


def mean_sqnr(measured: Sequence[Sqnr], kind: str = "") -> dict[str, float]:
    """Returns the mean decibels of each GEMM over all layers whose name ends with `kind`.

    Exact products, whose SQNR is infinite, count only if all are exact. NaN without any number.
    """
    found = {}
    for gemm in OPERANDS:
        values = [layer[gemm] for one in measured for name, layer in one.items() if name.endswith(kind)]
        finite = [value for value in values if math.isfinite(value)]
        exact = bool(values) and all(value == math.inf for value in values)
        found[gemm] = math.inf if exact else math.fsum(finite) / len(finite) if finite else math.nan
    return found


def kinds_of(measured: Iterable[Sqnr]) -> list[str]:
    """Returns the kinds of layers in blocks, such as mlp.down, in order."""
    return list(dict.fromkeys(name.split(".", 2)[2] for one in measured for name in one))


POINTS = 200
"""The largest number of points of a curve."""


def binned(points: Mapping[int, float]) -> Series:
    """Returns means of neighbouring points, at most POINTS of them, keyed by their last x."""
    ordered = sorted(points.items())
    size = max(-(-len(ordered) // POINTS), 1)
    bins = (ordered[i : i + size] for i in range(0, len(ordered), size))
    return {part[-1][0]: math.fsum(value for _, value in part) / len(part) for part in bins}


def decibels(value: float | None) -> str:
    """Returns the printed form of an SQNR; "exact" for infinity, empty for None and NaN."""
    if value is None or math.isnan(value):
        return ""
    return "exact" if value == math.inf else f"{value:.1f}"
