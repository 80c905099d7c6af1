"""The machine that the self-test runs on: device, driver, versions, and the code that it tests."""

import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
from jax.extend import backend

import mxjax
from mxjax.runtime.devices import INTERPRETER, current_target, has_triton, on_gpu

PACKAGES = ("jax", "jaxlib", "jax-rocm7-plugin", "jax-rocm7-pjrt", "jax-cuda13-plugin", "triton", "numpy")
VARIABLES = re.compile(r"^(XLA_|JAX_|TRITON_|MXJAX_|HIP_|HSA_|ROCR_|ROCM_|CUDA_VISIBLE|NVIDIA_VISIBLE)")
KFD = Path("/dev/kfd")  # AMD's kernel driver
VERSION_FILES = {
    "rocm": Path("/opt/rocm/.info/version"),
    "amdgpu driver": Path("/sys/module/amdgpu/version"),
    "nvidia driver": Path("/sys/module/nvidia/version"),
}


def describe() -> dict[str, Any]:
    """Returns the machine as JSON can hold it; starts the device.

    Raises:
      RuntimeError: Triton is missing, or an AMD GPU is there that JAX does not use.
    """
    if not has_triton():
        raise RuntimeError("the self-test needs Triton: install mxjax[rocm] or mxjax[cuda]")
    device = jax.devices()[0]
    if not on_gpu() and KFD.exists() and os.environ.get("JAX_PLATFORMS") != "cpu":
        raise RuntimeError(
            f"this machine has an AMD GPU ({KFD}), but JAX computes on {device.platform}: its plugin was not "
            "loaded; JAX_PLATFORMS=rocm python -c 'import jax; jax.devices()' says why"
        )
    target = current_target() if on_gpu() else INTERPRETER
    assert target is not None
    return {
        "target": list(target),
        "environment": {
            "device": device.device_kind,
            "devices": jax.device_count(),
            "runtime": backend.get_backend().platform_version,
            "drivers": _drivers(),
            "packages": installed(PACKAGES),
            "python": platform.python_version(),
            "kernel": platform.release(),
            "mxjax": mxjax.__version__,
            "source": source_digest(),
            "variables": {k: v for k, v in sorted(os.environ.items()) if VARIABLES.match(k)},
        },
    }


def _drivers() -> dict[str, str]:
    found = {name: path.read_text().strip() for name, path in VERSION_FILES.items() if path.is_file()}
    try:
        done = subprocess.run(["amd-smi", "version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return found
    return found | {"amd-smi": done.stdout.strip()[:500]}


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Returns the versions of those packages that are installed."""
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def source_digest() -> str:
    """Returns a digest of mxjax's modules, so that a changed kernel is tested anew."""
    package, kernels = Path(mxjax.__file__).parent, Path(__file__).parents[1]
    files = {path.resolve() for folder in (package, kernels) for path in folder.rglob("*.py")}
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
