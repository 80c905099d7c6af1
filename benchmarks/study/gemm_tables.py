"""Statistics of single GEMMs and their operands, as Markdown tables: Wgrad's, and what predicts losses."""

import json
import pathlib
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.study.cells import WGRAD_KINDS
from benchmarks.study.diagnosis_tables import prediction, source_of
from benchmarks.study.results import CellResult
from benchmarks.study.tables import number
from mxjax.policy import OPERANDS
from mxjax.runtime.tables import table

Record = Mapping[str, Any]
NOT_MEASURED = "Not measured yet."
RULES = ("floor", "even", "rceil")
OF_PRODUCTS = {
    "relative_error": "error of products",
    "cosine": "cosine of products",
    "projection": "projection of products",
}
OF_OPERANDS = {
    "relative_error": "error of operands",
    "projection": "projection of operands",
    "clipped": "clipped",
    "flushed": "flushed",
}
OF_SHAPES = {"kurtosis": "kurtosis", "outliers": "outliers", "crest": "crest"}
SHOWN = (
    {f"product {key}": name for key, name in OF_PRODUCTS.items()}
    | {f"operand {key}": name for key, name in OF_OPERANDS.items()}
    | {f"shape {key}": f"{name} of what is quantized" for key, name in OF_SHAPES.items()}
)
"""The statistics of a cell: means over its GEMMs and operands."""


def read(path: pathlib.Path) -> Record | None:
    """Returns the record in a file, None if there is none."""
    return json.loads(path.read_text()) if path.exists() else None


def wgrad_operands(record: Record | None) -> str:
    """Returns what Wgrad's operands are under three rules and each remedy; the other GEMMs are in MXFP4."""
    if record is None:
        return NOT_MEASURED
    rows = []
    for rule in RULES:
        for kind in WGRAD_KINDS:
            of_cell = record["cells"].get(f"{kind} {rule if rule == 'even' else f'even-even-{rule}'}")
            if of_cell is None:
                continue
            wgrad = of_cell["wgrad"]
            sides = [wgrad[name] for name in OPERANDS["wgrad"]]
            rows.append([f"{kind} `{rule}`", *_products(wgrad["product"]), *_sides(sides)])
    columns = "error of x, dy | projection of x, dy | clipped | flushed | kurtosis | crest | blocks past 1.5"
    return source_of(record) + "\n\n" + table(f"Wgrad | error of dw | its projection | {columns}", rows)


def _products(product: Mapping[str, float]) -> list[str]:
    return [number(product["relative_error"]), number(product["projection"])]


def _sides(sides: list[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the columns of x and dy, of both in one cell."""
    forms = {"relative_error": ".3f", "projection": ".4f", "clipped": ".4f", "flushed": ".3f"}
    for key, form in forms.items():
        yield ", ".join(number(side[key], form) for side in sides)
    for key, form in {"kurtosis": ".1f", "crest": ".2f"}.items():
        yield ", ".join(number(side["shape"][key], form) for side in sides)
    halves = ([side["mantissas"], len(side["mantissas"]) // 2] for side in sides)
    yield ", ".join(number(sum(mantissas[half:]), ".2f") for mantissas, half in halves)


def token_mean(record: Record | None) -> str:
    """Returns the share of the energy of x and dy that is in their mean over tokens, by layer."""
    if record is None:
        return NOT_MEASURED
    rows = [[name, *(number(m[t], ".3f") for t in ("x", "dy"))] for name, m in record["token_mean"].items()]
    return table("layer | x | dy", rows)


def gemm_prediction(cells: Mapping[str, CellResult], record: Record | None) -> str:
    """Returns how each statistic ranks the cells of the tuned ladder; see `diagnosis_tables.prediction`."""
    if record is None:
        return NOT_MEASURED
    of_cells = {name: dict(_of_cell(gemms)) for name, gemms in record["cells"].items()}
    return prediction(cells, {**record, "cells": of_cells}, SHOWN, ["tuned-60m"])


def _of_cell(gemms: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
    products = [gemm["product"] for gemm in gemms.values()]
    operands = [gemms[gemm][name] for gemm, names in OPERANDS.items() for name in names]
    shapes = [operand["shape"] for operand in operands]
    for kind, parts, names in (
        ("product", products, OF_PRODUCTS),
        ("operand", operands, OF_OPERANDS),
        ("shape", shapes, OF_SHAPES),
    ):
        for key in names:
            yield f"{kind} {key}", {"mean": statistics.fmean(part[key] for part in parts)}
