"""Run two sources' weight de-oscillation on walking weights and store what becomes of them.

Run with Python 3.11, torch 2.13.0+cpu, numpy, on checkouts of github.com/AMD-AGI/Primus at commit
fd1eeabbad15135e3702094087e96142b4b4eacb and github.com/thu-ml/TetraJet-v2-NVFP4Training at ca5953f:

    python tests/golden/make_deoscillation.py PRIMUS TETRAJET

The quantizer is torch.round, as in Primus's own unit tests: their FP4 needs a GPU. Writes deoscillation.npz:

    first [n], updates [steps, n]        weights before the first step, and what each step adds
    primus, tetrajet [steps, n]          weights after each step
    primus_setting, tetrajet_setting     ratio, period, start and window of `training.optimizer.deoscillation`
"""

import contextlib
import importlib
import pathlib
import sys
import types

import numpy as np
import torch

PRIMUS, TETRAJET = (3.0, 6, 3, 0), (2.0, 7, 8, 4)
STEPS, N = 24, 400


def load_primus(checkout: pathlib.Path):
    """Imports weight_deosc without the packages that its log needs."""
    for name in ("primus", "primus.core", "primus.core.utils", "primus.core.utils.module_utils"):
        sys.modules[name] = types.ModuleType(name)
    utilities = sys.modules["primus.core.utils.module_utils"]
    utilities.log_rank_0 = utilities.warning_rank_0 = print
    sys.path.insert(0, str(checkout / "primus/backends/megatron/core/optimizer"))
    import weight_deosc

    return weight_deosc


def run_primus(checkout: pathlib.Path, first: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    ratio, period, start, _ = PRIMUS
    module = load_primus(checkout)
    runner = module.WeightDeOscRunner(module.WeightDeOscConfig(True, period, ratio, start))
    weights, found, snapped = first.clone(), [], 0
    for step, update in enumerate(updates, 1):
        weights += update
        if step >= start:
            snapped += runner._track_and_snap("w", weights, weights.clone(), torch.round(weights))[0]
        found.append(weights.clone())
    print(f"Primus: {snapped} snapped")
    return torch.stack(found)


def load_tetrajet(checkout: pathlib.Path):
    """Imports calibrate with stand-ins for the CUDA kernels and for what is built on them."""
    stubs = {name: types.ModuleType(name) for name in ("tetrajetv2", "olmo", "olmo.config")}
    package = "olmo.quantization_real"
    for name in ("", ".utils", ".utils_type", ".oscillation_reset_memeff"):
        stubs[package + name] = types.ModuleType(package + name)
    stubs["tetrajetv2"].quant_fp4 = lambda w, seed: (torch.round(w), None, None)
    stubs["tetrajetv2"].dequant_fp4 = lambda q, outer, inner: q
    for name in ("NVFP4_QuantizerConfig", "NVFP4_Outlier_Selection_Config", "OscillationPerturb_Config"):
        setattr(stubs["olmo.config"], name, types.SimpleNamespace)
    stubs[package].__path__ = [str(checkout / "olmo2-training/olmo/quantization_real")]
    stubs[f"{package}.utils"].maybe_summon_full_params = lambda *_, **__: contextlib.nullcontext()
    stubs[f"{package}.utils_type"].check_quant_linear = lambda module: isinstance(module, torch.nn.Linear)
    stubs[f"{package}.utils_type"].check_quant_mix_linear = lambda module: False
    sys.modules |= stubs
    return importlib.import_module(f"{package}.calibrate")


def run_tetrajet(checkout: pathlib.Path, first: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    ratio, period, start, window = TETRAJET
    module = load_tetrajet(checkout)
    setting = types.SimpleNamespace(
        apply_perturb=True,
        perturb_start_iter=start - 1,  # it counts from 0
        perturb_period=period,
        detect_type="distance_ratio",
        detect_DistRatio_iters=window,
        detect_DistRatio_thrd=ratio,
    )
    config = types.SimpleNamespace(enabled_quantizers=[2], osci_perturb_setting=setting)
    model = torch.nn.Sequential(torch.nn.Linear(N, 1, bias=False))
    model[0].weight.data = first[None].clone()
    found = []
    with torch.no_grad():
        for step, update in enumerate(updates):
            model[0].weight += update
            module.linear_oscillation_reset_with_mix(config, step, model)
            found.append(model[0].weight[0].clone())
    return torch.stack(found)


def main(primus: pathlib.Path, tetrajet: pathlib.Path) -> None:
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(N, generator=generator) * 2
    steps = 10 ** (torch.rand(N, generator=generator) * 3 - 3)  # from steps that stay to steps that leave
    updates = torch.randn(STEPS, N, generator=generator) * steps
    updates[:, :5] = 0  # weights that never move
    arrays = {
        "first": first,
        "updates": updates,
        "primus": run_primus(primus, first, updates),
        "tetrajet": run_tetrajet(tetrajet, first, updates),
    }
    path = pathlib.Path(__file__).with_name("deoscillation.npz")
    settings = {"primus_setting": PRIMUS, "tetrajet_setting": TETRAJET}
    versions = np.array([f"torch {torch.__version__}", "Primus fd1eeabb", "TetraJet-v2 ca5953f"])
    np.savez_compressed(path, versions=versions, **settings, **{k: v.numpy() for k, v in arrays.items()})
    print(path, path.stat().st_size)


if __name__ == "__main__":
    main(*map(pathlib.Path, sys.argv[1:]))
