"""The device on which JAX computes, and the target of Triton kernels. Imports no Triton."""

import contextlib
import functools
import importlib.util
from typing import NamedTuple

import jax


class Target(NamedTuple):
    """The target that kernels are compiled for.

    Attributes:
      backend: "cuda", "hip", or "interpreter".
      arch: "sm_90", "gfx950" and so on; "software" for the interpreter.
    """

    backend: str
    arch: str

    @property
    def compute_capability(self) -> int | None:
        """90 for sm_90, None off CUDA."""
        return int(self.arch.removeprefix("sm_")) if self.backend == "cuda" else None

    @property
    def has_fp8(self) -> bool:
        """Whether it converts to and multiplies OCP's FP8: CUDA from sm_89 on, gfx950 and the interpreter."""
        if self.backend == "hip":
            return self.arch == "gfx950"
        return (self.compute_capability or 89) >= 89


INTERPRETER = Target("interpreter", "software")
"""Triton's interpreter on the CPU. Set TRITON_INTERPRET=1 before kernels are imported."""

_used_target = jax.make_user_context(None)  # JAX keeps no trace of one target for another


def use_target(target: Target) -> contextlib.AbstractContextManager[None]:
    """A context in which kernels run on `target`: the interpreter, or a GPU to lower for without one."""
    return _used_target(target)


def current_target() -> Target | None:
    """Returns the target of Triton kernels, or None where they do not run.

    It is `use_target`'s, else this machine's GPU if Triton is installed.
    """
    if _used_target.value is not None:
        return _used_target.value
    return _device_target() if on_gpu() and has_triton() else None


def platform() -> str:
    """Returns the platform on which JAX computes by default, such as "cpu"."""
    device = jax.config.jax_default_device
    return str(getattr(device, "platform", device) or jax.default_backend())


def on_gpu() -> bool:
    """Whether JAX computes on a GPU by default."""
    return platform() in ("gpu", "cuda", "rocm")


@functools.cache
def has_triton() -> bool:
    """Whether Triton, which compiles the kernels, is installed."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _device_target() -> Target:
    device = jax.devices("gpu")[0]
    capability = str(device.compute_capability)  # "9.0" on CUDA, "gfx950" on ROCm
    if capability.startswith("gfx"):
        return Target("hip", capability.split(":")[0])
    return Target("cuda", "sm_" + capability.replace(".", ""))
