"""Device memory as JAX reports it; `training.memory` estimates what a step needs."""

import os
from typing import Any

import jax


def memory_use(device: Any) -> dict[str, int]:
    """Returns memory_bytes and memory_peak_bytes: a device's present and highest use; empty on CPUs."""
    stats = device.memory_stats() or {}
    names = {"memory_bytes": "bytes_in_use", "memory_peak_bytes": "peak_bytes_in_use"}
    return {name: stats[theirs] for name, theirs in names.items() if theirs in stats}


def memory_limit(device: Any) -> int | None:
    """Returns the bytes that JAX may allocate on a device; None if it does not say."""
    return (device.memory_stats() or {}).get("bytes_limit")


def memory_there_is() -> float:
    """Returns the bytes that each device of this process may use: on CPUs an equal share of the host's."""
    limit = memory_limit(jax.local_devices()[0])
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return host / jax.local_device_count() if limit is None else limit


def gib(size: float) -> str:
    """Returns bytes as GiB, with three significant digits."""
    value = size / 2**30
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
