"""The diagnosis as text tables."""

import math
import statistics
from collections.abc import Mapping
from typing import Any

from mxjax.policy import OPERANDS
from training.log.display import text_table


def gemm_table(layers: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the errors of each layer's GEMMs: products, then the worse of both operands."""
    rows = []
    for layer, measures in layers.items():
        for gemm, names in OPERANDS.items():
            product, operands = measures[gemm]["product"], [measures[gemm][name] for name in names]
            rows.append(
                [
                    layer if gemm == "fprop" else "",
                    gemm,
                    f"{product['sqnr_db']:.1f}",
                    f"{product['relative_error']:.4f}",
                    f"{product['cosine']:.5f}",
                    f"{product['projection']:.5f}",
                    *(f"{measures[gemm][name]['projection']:.5f}" for name in names),
                    f"{max(o['clipped'] for o in operands):.4f}",
                    f"{max(o['flushed'] for o in operands):.4f}",
                ]
            )
    projections = ["projection", "lhs projection", "rhs projection"]
    return text_table(
        ["layer", "GEMM", "SQNR dB", "error", "cosine", *projections, "clipped", "flushed"], rows
    )


def shape_table(layers: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns how far each kind of layer's Wgrad operands are from normal, in means over the blocks."""
    kinds = dict.fromkeys(name.split(".", 2)[2] for name in layers)
    rows = []
    for kind in kinds:
        chosen = [measures for name, measures in layers.items() if name.endswith(kind)]
        for tensor in ("x", "dy"):
            before, after = (
                {key: statistics.fmean(m["wgrad"][tensor][when][key] for m in chosen) for key in _SHAPE}
                for when in ("before_rotation", "after_rotation")
            )
            pairs = [f"{form.format(before[k])} > {form.format(after[k])}" for k, form in _SHAPE.items()]
            energy = statistics.fmean(m["token_mean"][tensor] for m in chosen)
            rows.append([kind if tensor == "x" else "", tensor, *pairs, f"{energy:.3f}"])
    header = ["Wgrad's operand", "", "kurtosis", "outliers", "crest", "energy of token mean"]
    return text_table(header, rows)


_SHAPE = {"kurtosis": "{:.1f}", "outliers": "{:.1e}", "crest": "{:.3f}"}


def split_table(splits: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the split of the gradients' error over all layers, a row for each key of `splits`."""
    rows = [[name, *(_with_interval(key, splits[name]["all"][key]) for key in _SPLIT)] for name in splits]
    return text_table(["", *_SPLIT.values()], rows)


_SPLIT = {
    "error": "error",
    "repeating_share": "share that repeats",
    "along": "along gradient",
    "across": "across gradient",
    "gradient_over_noise": "gradient / (sqrt 3 noise)",
}


def _with_interval(key: str, estimate: Mapping[str, float]) -> str:
    if key == "across" and estimate["mean"] == 0:  # its square came out negative
        return "not resolved"
    mean, half = estimate["mean"], (estimate["high"] - estimate["low"]) / 2
    shown = f"{half:.0e}" if 0 < half < 5e-5 else f"{half:.4f}"
    return f"{mean:.4f}" + ("" if math.isnan(half) else f" ± {shown}")


def summary(found: Mapping[str, Any]) -> str:
    """Returns all tables, each after a line that says what it shows."""
    whole = split_table({found["policy"]: found["gradient"]})
    parts = (
        "Errors of GEMMs against float32, on the tensors that the policy's own pass gave:",
        gemm_table(found["layers"]),
        "\nWgrad's operands before > after rotation (H16 where the policy has none):",
        shape_table(found["layers"]),
        f"\nError of whole gradients against bf16, all blocks (95 % jackknife intervals):\n{whole}",
        "\nError of Wgrad alone on the same tensors, all blocks:",
        split_table(found["wgrad"]),
    )
    return "\n".join(parts)
