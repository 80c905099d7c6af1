"""The diagnosis as heat maps by layer, and histograms of block scales and maxima."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mxjax.policy import OPERANDS
from training.process.extras import require

_GEMM_MAPS = {
    "relative error": lambda gemm, names: gemm["product"]["relative_error"],
    "1 - projection": lambda gemm, names: 1 - gemm["product"]["projection"],
    "clipped": lambda gemm, names: max(gemm[name]["clipped"] for name in names),
    "flushed": lambda gemm, names: max(gemm[name]["flushed"] for name in names),
}


def draw(found: Mapping[str, Any], folder: pathlib.Path) -> list[pathlib.Path]:
    """Draws the plots of a diagnosis into a folder and returns their paths.

    Raises:
      MissingExtraError: matplotlib is not installed.
    """
    drawn = {"gemms.svg": gemms(found), "wgrad.svg": wgrad(found), "histograms.svg": histograms(found)}
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in drawn.items():
        figure.savefig(folder / name, facecolor="white", metadata={"Date": None})
    return [folder / name for name in drawn]


def gemms(found: Mapping[str, Any]) -> Any:
    """Returns heat maps of the errors of every layer's GEMMs."""
    return _heat_maps({title: _gemm_grid(found["layers"], f) for title, f in _GEMM_MAPS.items()})


def wgrad(found: Mapping[str, Any]) -> Any:
    """Returns heat maps of the error of every layer's Wgrad, and of how much of it repeats, by variant."""
    return _heat_maps(
        {
            "Wgrad's error": _split_grid(found["wgrad"], "error"),
            "share of it that repeats": _split_grid(found["wgrad"], "repeating_share"),
        }
    )


Grid = tuple[Sequence[str], Sequence[str], np.ndarray]
"""Labels of rows and of columns, and the values."""


def _gemm_grid(layers: Mapping[str, Any], value) -> Grid:
    """Returns values by kind of layer and GEMM (rows) and block (columns)."""
    kinds, blocks = _axes(layers)
    rows = [(kind, gemm) for kind in kinds for gemm in OPERANDS]
    values = [
        [value(layers[f"blocks.{i}.{kind}"][gemm], OPERANDS[gemm]) for i in blocks] for kind, gemm in rows
    ]
    return [f"{kind} {gemm}" for kind, gemm in rows], [str(i) for i in blocks], np.array(values)


def _split_grid(splits: Mapping[str, Any], key: str) -> Grid:
    """Returns values by variant (rows) and layer (columns)."""
    layers = [name for name in next(iter(splits.values())) if name.startswith("blocks.")]
    values = [[of_variant[layer][key]["mean"] for layer in layers] for of_variant in splits.values()]
    return list(splits), [layer.removeprefix("blocks.") for layer in layers], np.array(values)


def _axes(layers: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    kinds = list(dict.fromkeys(name.split(".", 2)[2] for name in layers))
    return kinds, sorted({int(name.split(".")[1]) for name in layers})


def _heat_maps(grids: Mapping[str, Grid]) -> Any:
    """Draws a panel for each grid; darker is larger, so that it is legible in grey."""
    rows, columns, _ = next(iter(grids.values()))
    size = (2.2 + len(grids) * max(1.6, 0.2 * len(columns)), 1.4 + 0.24 * len(rows))
    figure = require("plot", "--out", "matplotlib.figure").Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(grids), sharey=True, squeeze=False)[0]
    for axes, (title, (rows, columns, values)) in zip(panels, grids.items(), strict=True):
        image = axes.imshow(values, cmap="Greys", aspect="auto")
        axes.set_title(title, fontsize=9)
        axes.set_yticks(range(len(rows)), rows, fontsize=7)
        axes.set_xticks(range(len(columns)), columns, fontsize=6, rotation=90 if len(columns) > 12 else 0)
        figure.colorbar(image, ax=axes, fraction=0.08)
    return figure


def histograms(found: Mapping[str, Any]) -> Any:
    """Returns histograms of operands by GEMM: block scales (left), mantissas of block maxima (right)."""
    figure = require("plot", "--out", "matplotlib.figure").Figure(figsize=(9, 7), layout="constrained")
    panels = figure.subplots(len(OPERANDS), 2, sharex="col", squeeze=False)
    for (gemm, names), (left, right) in zip(OPERANDS.items(), panels, strict=True):
        for name, line in zip(names, ("-", "--"), strict=True):
            operands = [m[gemm][name] for m in found["layers"].values() if "scales" in m[gemm][name]]
            if not operands:
                continue
            scales = np.zeros(256)
            for operand in operands:
                start = operand["scales"]["lowest"] + 127
                scales[start : start + len(operand["scales"]["share"])] += operand["scales"]["share"]
            used = np.flatnonzero(scales[1:]) + 1  # byte 0 is mostly that of zero blocks
            exponents = np.arange(used[0], used[-1] + 1)
            style = {"color": "black", "linestyle": line, "label": name}
            left.step(exponents - 127, scales[exponents] / len(operands), where="mid", **style)
            mantissas = np.mean([operand["mantissas"] for operand in operands], axis=0)
            centres = 1 + (np.arange(len(mantissas)) + 0.5) / len(mantissas)
            right.step(centres, mantissas, where="mid", **style)
        left.set_ylabel(f"{gemm}: share of blocks")
        if left.lines:
            left.legend(frameon=False)
    panels[-1][0].set_xlabel("exponent of the block scale")
    panels[-1][1].set_xlabel("mantissa of the block's largest magnitude")
    return figure
