"""Run AMD-AGI/Primus's weight de-oscillation on walking weights and store what becomes of them.

Run with Python 3.11, torch 2.13.0+cpu, numpy, on a checkout of github.com/AMD-AGI/Primus at commit
fd1eeabbad15135e3702094087e96142b4b4eacb:

    python tests/golden/make_deoscillation.py CHECKOUT

The quantizer is torch.round, as in Primus's own unit tests: its MXFP4 needs a GPU. Writes deoscillation.npz:

    first [n], updates [steps, n]   weights before the first step, and what each step adds
    weights [steps, n]              weights after each step
"""

import pathlib
import sys
import types

import numpy as np
import torch

RATIO, PERIOD, START, STEPS, N = 3.0, 6, 3, 24, 400


def load(checkout: pathlib.Path):
    """Imports weight_deosc without the packages that its log needs."""
    for name in ("primus", "primus.core", "primus.core.utils", "primus.core.utils.module_utils"):
        sys.modules[name] = types.ModuleType(name)
    utilities = sys.modules["primus.core.utils.module_utils"]
    utilities.log_rank_0 = utilities.warning_rank_0 = print
    sys.path.insert(0, str(checkout / "primus/backends/megatron/core/optimizer"))
    import weight_deosc

    return weight_deosc


def main(checkout: pathlib.Path) -> None:
    module = load(checkout)
    config = module.WeightDeOscConfig(True, PERIOD, RATIO, START)
    runner = module.WeightDeOscRunner(config)
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(N, generator=generator) * 2
    steps = 10 ** (torch.rand(N, generator=generator) * 3 - 3)  # from steps that stay to steps that leave
    updates = torch.randn(STEPS, N, generator=generator) * steps
    updates[:, :5] = 0  # weights that never move
    weights, found, snapped = first.clone(), [], 0
    for step, update in enumerate(updates, 1):
        weights += update
        if step >= START:
            snapped += runner._track_and_snap("w", weights, weights.clone(), torch.round(weights))[0]
        found.append(weights.clone())
    path = pathlib.Path(__file__).with_name("deoscillation.npz")
    arrays = {"first": first, "updates": updates, "weights": torch.stack(found)}
    settings = {"ratio": RATIO, "period": PERIOD, "start": START}
    versions = np.array([f"torch {torch.__version__}", "Primus fd1eeabb"])
    np.savez_compressed(path, versions=versions, **settings, **{k: v.numpy() for k, v in arrays.items()})
    print(path, path.stat().st_size, f"{snapped} snapped")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
