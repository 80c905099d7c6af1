"""A checkpoint's diagnosis by layer, as Markdown tables: operands, and what repeats of Wgrad's error."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from mxjax.policy import OPERANDS
from mxjax.runtime.tables import table

Record = Mapping[str, Any]
SHAPES = {"kurtosis": ".1f", "outliers": ".4f", "crest": ".2f"}


def operands(record: Record) -> str:
    """Returns each operand's flushed share, and its shape before and after H16, by kind of layer.

    Means over blocks; of what is flushed also the least and the most.
    """
    kinds = dict.fromkeys(name.split(".", 2)[2] for name in record["layers"])
    rows = []
    for kind in kinds:
        layers = [layer for name, layer in record["layers"].items() if name.endswith(f".{kind}")]
        for gemm, names in OPERANDS.items():
            for name in names:
                found = [layer[gemm][name] for layer in layers]
                flushed = [operand["flushed"] for operand in found]
                shown = [f"{statistics.fmean(flushed):.3f}", f"{min(flushed):.3f}", f"{max(flushed):.3f}"]
                rows.append([f"{kind}, {gemm} {name}", *shown, *_shapes(found)])
    shapes = " | ".join(f"{name} | after H16" for name in SHAPES)
    return table(f"operand | flushed | least | most | {shapes}", rows)


def _shapes(found: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        format(statistics.fmean(operand[when][name] for operand in found), form)
        for name, form in SHAPES.items()
        for when in ("before_rotation", "after_rotation")
    ]


def repeating(record: Record) -> str:
    """Returns in how many layers the share of Wgrad's error that repeats is shown, and the largest shares."""
    rows = []
    for variant, of_layers in record["wgrad"].items():
        shares = {name: x["repeating_share"] for name, x in of_layers.items() if name.startswith("blocks.")}
        largest = sorted(shares, key=lambda name: -shares[name]["mean"])[:2]
        count = sum(share["low"] > 0 for share in shares.values())
        most = (
            f"{name.removeprefix('blocks.')} {s['mean']:.4f} ({s['low']:+.4f} to {s['high']:+.4f})"
            for name, s in ((name, shares[name]) for name in largest)
        )
        rows.append([variant, count, len(shares), *most])
    return table("Wgrad | layers above zero | layers | largest share | second largest", rows)
