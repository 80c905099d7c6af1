"""Checks of products on two devices, which `products` computes: Explicit axes, and `shard_map`."""

import json

from benchmarks.native.work import Found, Work

PRODUCT = 2e-3
"""Bound between implementations of one product, as in the self-test."""


def axes(work: Work) -> Found:
    """Meshes with Explicit axes against one device, in four layouts."""
    return _products(work, "axes")


def shard_map(work: Work) -> Found:
    """Under `shard_map`, with Auto and with Explicit axes, each half against that half on one device."""
    return _products(work, "shard_map")


def _products(work: Work, name: str) -> Found:
    program = work.start("-m", "benchmarks.native.products", name, *work.sizes.product, name=name).done()
    by_policy = json.loads(program.last_json)
    figures = {f"{p}_{array}": error for p, errors in by_policy.items() for array, error in errors.items()}
    return Found(figures, dict.fromkeys(figures, (0.0, PRODUCT)))
