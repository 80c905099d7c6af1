"""How fast a run is and what memory it has, as the devices say."""

import re
import types
from collections.abc import Mapping
from typing import Any

PEAK_FLOPS: Mapping[str, float] = types.MappingProxyType(
    {
        # NVIDIA's H100 and H200 data sheets, BF16 "with sparsity" halved.
        r"H100 PCIe": 756e12,
        r"H100 NVL": 835e12,
        r"H100|H200|GH200": 989e12,
        # NVIDIA's HGX B200 and GB200 NVL72 pages, a GPU of theirs, likewise halved.
        r"B200": 2250e12,
        r"GB200": 2500e12,
        # AMD's data sheets; for MI355X see docs/mi355x.md.
        r"MI300X": 1307e12,
        r"MI355X": 2516.6e12,
    }
)
"""Dense BF16 FLOP/s of a device whose name has such a word: the first that matches."""


def peak_flops(device_kind: str) -> float | None:
    """Returns a device's published dense BF16 peak in FLOP/s, or None if it is not known."""
    found = (peak for name, peak in PEAK_FLOPS.items() if re.search(rf"\b({name})\b", device_kind))
    return next(found, None)


def speed(tokens: int, flops: float, seconds: float, devices: list[Any]) -> dict[str, float]:
    """Returns the rates of steps of so many tokens and model FLOPs in so many seconds, on all devices.

    Returns:
      tokens_per_s: of all devices.
      tflops_per_device: model FLOPs, so that what is computed again does not count, in 1e12 a second.
      mfu: their fraction of the device's dense BF16 peak, whatever precision the GEMMs run in; missing
        where that is not known.
    """
    rate = flops / seconds / len(devices)
    peak = peak_flops(devices[0].device_kind)
    found = {"tokens_per_s": tokens / seconds, "tflops_per_device": rate / 1e12}
    return found if peak is None else found | {"mfu": rate / peak}


def memory_use(device: Any) -> dict[str, int]:
    """Returns memory_bytes and memory_peak_bytes, a device's use now and at most so far; empty on CPUs."""
    stats = device.memory_stats() or {}
    names = {"memory_bytes": "bytes_in_use", "memory_peak_bytes": "peak_bytes_in_use"}
    return {name: stats[theirs] for name, theirs in names.items() if theirs in stats}


def memory_limit(device: Any) -> int | None:
    """Returns the bytes that JAX may take on a device, or None if it does not say."""
    return (device.memory_stats() or {}).get("bytes_limit")


def in_words(values: Mapping[str, float]) -> str:
    """Returns `speed`'s and `memory_use`'s values for people."""
    parts = [f"{values['tokens_per_s']:,.0f} tokens/s"]
    if "mfu" in values:
        parts.append(f"MFU {100 * values['mfu']:.1f} %")
    else:
        parts.append(f"{values['tflops_per_device']:.3g} TFLOP/s")
    if "memory_peak_bytes" in values:
        parts.append(f"peak {gib(values['memory_peak_bytes'])} GiB")
    return "  ".join(parts)


def gib(size: float) -> str:
    """Returns bytes as GiB, with three significant digits."""
    value = size / 2**30
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
