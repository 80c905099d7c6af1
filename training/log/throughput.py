"""Throughput of a run: tokens a second, model FLOP/s, and MFU, their share of a device's peak."""

import re
import types
from collections.abc import Mapping
from typing import Any

from training.memory import gib

PEAK_FLOPS: Mapping[str, float] = types.MappingProxyType(
    {
        # NVIDIA's H100 and H200 data sheets; half of BF16 "with sparsity".
        r"H100 PCIe": 756e12,
        r"H100 NVL|H200 NVL": 835e12,
        r"H100|H200|GH200": 989e12,
        # NVIDIA's HGX B200 and GB200 NVL72 pages, per GPU; halved likewise.
        r"B200": 2250e12,
        r"GB200": 2500e12,
        # AMD's data sheets; for MI355X see docs/mi355x.md.
        r"MI300X": 1307e12,
        r"MI355X": 2516.6e12,
    }
)
"""Dense BF16 FLOP/s by a word in the device's name; the first match holds."""


def peak_flops(device_kind: str) -> float | None:
    """Returns a device's published dense BF16 peak in FLOP/s, or None if it is unknown."""
    found = (peak for name, peak in PEAK_FLOPS.items() if re.search(rf"\b({name})\b", device_kind))
    return next(found, None)


def speed(tokens: int, flops: float, seconds: float, devices: list[Any]) -> dict[str, float]:
    """Returns the throughput of a step on all devices.

    Args:
      tokens, flops: tokens and model FLOPs of the step; recomputation does not count.
    Returns:
      tokens_per_s: over all devices.
      tflops_per_device: model FLOPs in 1e12 a second.
      mfu: share of the device's dense BF16 peak, whatever precision the GEMMs run in; missing where the peak
        is unknown.
    """
    rate = flops / seconds / len(devices)
    peak = peak_flops(devices[0].device_kind)
    found = {"tokens_per_s": tokens / seconds, "tflops_per_device": rate / 1e12}
    return found if peak is None else found | {"mfu": rate / peak}


def in_words(values: Mapping[str, float]) -> str:
    """Returns the printed form of `speed` and `memory_use`."""
    parts = [f"{values['tokens_per_s']:,.0f} tokens/s"]
    if "mfu" in values:
        parts.append(f"MFU {100 * values['mfu']:.1f} %")
    else:
        parts.append(f"{values['tflops_per_device']:.3g} TFLOP/s")
    if "memory_peak_bytes" in values:
        parts.append(f"peak {gib(values['memory_peak_bytes'])} GiB")
    return "  ".join(parts)
