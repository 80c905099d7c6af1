"""The diagnosis as heat maps by layer, and histograms of block scales and maxima.

Figures are on white, which dark pages show too, and darker is larger, so that they are legible in grey.
"""

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mxjax.policy import OPERANDS
from training.process.start import require

_GEMM_MAPS = {
    "relative error": lambda gemm, names: gemm["product"]["relative_error"],
    "1 - projection": lambda gemm, names: 1 - gemm["product"]["projection"],
    "clipped": lambda gemm, names: max(gemm[name]["clipped"] for name in names),
    "flushed to zero": lambda gemm, names: max(gemm[name]["flushed"] for name in names),
}


class Grid(NamedTuple):
    """The values of a heat map and the labels of its rows and columns; `xlabel` says what columns are."""

    rows: Sequence[str]
    columns: Sequence[str]
    values: np.ndarray
    xlabel: str


def draw(found: Mapping[str, Any], folder: pathlib.Path) -> list[pathlib.Path]:
    """Draws the plots of a diagnosis into a folder and returns their paths.

    A plot without values is left out, and one that an earlier diagnosis left there is removed.

    Raises:
      MissingExtraError: matplotlib is not installed.
    """
    figures = {"gemms.svg": gemms(found), "wgrad.svg": wgrad(found), "histograms.svg": histograms(found)}
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        if figure is None:
            (folder / name).unlink(missing_ok=True)
            continue
        figure.suptitle(f"{found['run']}, step {found['step']}, policy {found['policy']}", fontsize=9)
        figure.savefig(folder / name, facecolor="white", metadata={"Date": None})
    return [folder / name for name, figure in figures.items() if figure is not None]


def gemms(found: Mapping[str, Any]) -> Any:
    """Returns heat maps of the errors of every layer's GEMMs; None if there are none."""
    return _heat_maps({title: _gemm_grid(found["layers"], f) for title, f in _GEMM_MAPS.items()})


def wgrad(found: Mapping[str, Any]) -> Any:
    """Returns heat maps of the error of every layer's Wgrad, and of how much of it repeats, by variant."""
    splits = found["wgrad"]
    by_error = sorted(splits, key=lambda variant: splits[variant]["all"]["error"]["mean"])
    ordered = {variant: splits[variant] for variant in by_error}
    return _heat_maps(
        {
            "Wgrad's relative error": _split_grid(ordered, found["layers"], "error"),
            "share of it that repeats": _split_grid(ordered, found["layers"], "repeating_share"),
        }
    )


def _gemm_grid(layers: Mapping[str, Any], value) -> Grid:
    """Returns values by kind of layer and GEMM (rows) and block (columns)."""
    kinds = list(dict.fromkeys(name.split(".", 2)[2] for name in layers))
    blocks = sorted({int(name.split(".")[1]) for name in layers})
    rows = [(kind, gemm) for kind in kinds for gemm in OPERANDS]
    values = [
        [value(layers[f"blocks.{i}.{kind}"][gemm], OPERANDS[gemm]) for i in blocks] for kind, gemm in rows
    ]
    labels = [f"{kind} {gemm.capitalize()}" for kind, gemm in rows]
    return Grid(labels, [str(i) for i in blocks], np.array(values), "block")


def _split_grid(splits: Mapping[str, Any], layers: Iterable[str], key: str) -> Grid:
    """Returns values by variant (rows) and layer, by depth (columns)."""
    layers = sorted(layers, key=lambda name: int(name.split(".")[1]))  # stable: a block's keep their order
    values = [[of_variant[layer][key]["mean"] for layer in layers] for of_variant in splits.values()]
    columns = [" ".join(layer.split(".", 2)[1:]) for layer in layers]
    return Grid(list(splits), columns, np.array(values), "block and layer")


def _heat_maps(grids: Mapping[str, Grid]) -> Any:
    """Draws a panel for each grid with a value other than zero; returns None without such a grid."""
    shown = {title: grid for title, grid in grids.items() if np.nan_to_num(grid.values).any()}
    if not shown:
        return None
    first = next(iter(shown.values()))
    is_turned = max(map(len, first.columns)) > 3
    height = 1.6 + 0.24 * len(first.rows) + (1.0 if is_turned else 0)
    size = (2.2 + len(shown) * max(2.2, 0.2 * len(first.columns)), height)
    figure = require("plot", "--out", "matplotlib.figure").Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axes, (title, grid) in zip(panels, shown.items(), strict=True):
        image = axes.imshow(grid.values, cmap="Greys", aspect="auto")
        axes.set_title(title, fontsize=9)
        axes.set_yticks(range(len(grid.rows)), grid.rows, fontsize=7)
        axes.set_xticks(range(len(grid.columns)), grid.columns, fontsize=6, rotation=90 if is_turned else 0)
        axes.set_xlabel(grid.xlabel, fontsize=8)
        figure.colorbar(image, ax=axes, fraction=0.08).ax.tick_params(labelsize=7)
    return figure


def histograms(found: Mapping[str, Any]) -> Any:
    """Returns histograms of operands by GEMM: block scales (left), mantissas of block maxima (right).

    GEMMs whose operands have no E8M0 scales are left out; None if all are.
    """
    layers = found["layers"].values()
    scaled = {
        gemm: {name: [m[gemm][name] for m in layers if "scales" in m[gemm][name]] for name in names}
        for gemm, names in OPERANDS.items()
    }
    scaled = {gemm: operands for gemm, operands in scaled.items() if any(operands.values())}
    if not scaled:
        return None
    size = (9, 0.8 + 2.6 * len(scaled))
    figure = require("plot", "--out", "matplotlib.figure").Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(scaled), 2, sharex="col", squeeze=False)
    for (gemm, operands), (left, right) in zip(scaled.items(), panels, strict=True):
        for (name, measured), line in zip(operands.items(), ("-", "--"), strict=True):
            if measured:
                _draw_operand(left, right, measured, {"color": "black", "linestyle": line, "label": name})
        left.set_ylabel(f"{gemm.capitalize()}: share of blocks")
        left.legend(frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0)
        for axes in (left, right):
            axes.set_ylim(bottom=0)
            axes.spines[["top", "right"]].set_visible(False)
    panels[-1][0].set_xlabel("exponent of the block scale")
    panels[-1][1].set_xlabel("mantissa of the block's largest magnitude")
    return figure


def _draw_operand(
    left: Any, right: Any, measured: Sequence[Mapping[str, Any]], style: dict[str, Any]
) -> None:
    """Draws the means over layers of an operand's scales and mantissas."""
    scales = np.zeros(256)
    for operand in measured:
        start = operand["scales"]["lowest"] + 127
        scales[start : start + len(operand["scales"]["share"])] += operand["scales"]["share"]
    used = np.flatnonzero(scales[1:]) + 1  # byte 0 is mostly that of zero blocks
    if len(used):
        exponents = np.arange(used[0], used[-1] + 1)
        left.step(exponents - 127, scales[exponents] / len(measured), where="mid", **style)
    mantissas = np.mean([operand["mantissas"] for operand in measured], axis=0)
    centres = 1 + (np.arange(len(mantissas)) + 0.5) / len(mantissas)
    right.step(centres, mantissas, where="mid", **style)
