"""Implementations of a policy's GEMMs, and the choice among them."""

import logging
from collections.abc import Iterable
from functools import cache
from typing import Literal, NamedTuple, get_args

import jax

from mxjax.numerics.formats import get_format
from mxjax.operands.use import Form
from mxjax.policy.policy import Gemm, Policy
from mxjax.products.gradients import gradients_read_tensors
from mxjax.runtime.devices import Target, current_target, has_triton, platform
from mxjax.runtime.remat import Remat

Implementation = Literal["reference", "xla", "fp8_carriers", "scaled_dot", "triton", "aiter"]
GemmImplementation = Literal[
    "reference", "xla", "fp8_carriers", "scaled_dot", "triton", "aiter", "fp8_tensor", "xla_by_kernel"
]
"""How one GEMM runs: its implementation, "fp8_tensor" for FP8 operands with one scale per tensor, or
"xla_by_kernel", which is "xla" on two operands that the quantizer kernel writes, in bfloat16 and K-major."""

ON_PACKED: tuple[GemmImplementation, ...] = ("fp8_carriers", "scaled_dot", "triton", "aiter")
"""Implementations that take packed operands."""


def form_of(implementation: GemmImplementation) -> Form | None:
    """Returns the form of the operands that a GEMM multiplies; see `OperandUse.form`.

    The GEMM alone decides it, so that its two operands are always alike.
    """
    if implementation in ON_PACKED:
        return "packed"
    if implementation == "fp8_tensor":
        return "fp8"
    return "bf16" if implementation == "xla_by_kernel" else None


_log = logging.getLogger("mxjax")


class GemmImplementations(NamedTuple):
    """The implementation of each GEMM of a policy here; hashable."""

    fprop: GemmImplementation
    dgrad: GemmImplementation
    wgrad: GemmImplementation


def implementations_of(policy: Policy, implementation: Implementation | None) -> GemmImplementations:
    """Returns the implementation of each of the policy's GEMMs here.

    Raises:
      ValueError, NotImplementedError: see `choose_implementation`.
      NotImplementedError: a named implementation does not take the operands of one of the GEMMs.
    """
    name = choose_implementation(implementation)
    explicit = implementation is not None
    each: list[GemmImplementation] = [
        _implementation_of(name, gemm, explicit) for gemm in policy.gemms.values()
    ]
    return GemmImplementations(*each)


def check_implementations(policies: Iterable[Policy], implementation: Implementation | None) -> None:
    """Raises the errors of `implementations_of` for any of the policies, before anything is compiled."""
    for policy in policies:
        implementations_of(policy, implementation)


def compiler_options(policies: Iterable[Policy], implementation: Implementation | None) -> dict[str, bool]:
    """Returns `jax.jit(compiler_options=)` for a program with GEMMs of these policies.

    On the CPU they keep XLA from dropping conversions to bfloat16, which it drops elsewhere on a mesh than on
    one device. On CUDA they turn off Triton's GEMMs for products in FP8 or float32 and for operands that
    XLA's operations quantize: XLA would tune them for minutes, the operations of the operands included,
    before it chooses cuBLAS.
    """
    target, policies = current_target(), tuple(policies)
    if target is None or target.backend != "cuda":
        return {"xla_allow_excess_precision": False} if target is None and platform() == "cpu" else {}
    used = {name for policy in policies for name in implementations_of(policy, implementation)}
    formats = {
        o.format for policy in policies for gemm in policy.gemms.values() for o in (gemm.lhs, gemm.rhs)
    }
    in_fp8_or_float32 = used & {"fp8_carriers", "fp8_tensor"} or "fp32" in formats
    tunes_long = in_fp8_or_float32 or quantizes_by_xla(policies, implementation)
    return {"xla_gpu_enable_triton_gemm": False} if tunes_long else {}


def quantizes_by_xla(policies: Iterable[Policy], implementation: Implementation | None) -> bool:
    """Whether an operand of any of the policies is quantized in blocks by XLA, because no kernel does it."""
    for policy in policies:
        each = implementations_of(policy, implementation)
        for name, gemm in zip(each, policy.gemms.values(), strict=True):
            formats = (get_format(o.format) for o in (gemm.lhs, gemm.rhs))
            if name in ("reference", "xla") and any(f.scale != "none" for f in formats):
                return True
    return False


def _implementation_of(name: Implementation, gemm: Gemm, explicit: bool) -> GemmImplementation:
    if name == "reference":
        return name
    operands = (gemm.lhs, gemm.rhs)
    if name == "xla":
        return "xla_by_kernel" if _kernel_quantizes(gemm) else "xla"
    if all(o.is_packable for o in operands):
        return name
    formats = [get_format(o.format) for o in operands]
    if all(f.element is None for f in formats):
        return "xla"  # nothing is quantized
    per_tensor = all(f.element is not None and f.scale == "none" for f in formats)
    if per_tensor and not all(o.format == "fp8_e5m2" for o in operands):
        return "fp8_tensor"
    if explicit:
        raise NotImplementedError(
            f"implementation {name!r} takes MXFP4 in blocks of 32 or 32x32 on both sides, FP8 or BF16, not "
            f"{gemm}; use 'xla', or None for the fastest"
        )
    return "xla_by_kernel" if _kernel_quantizes(gemm) else "xla"


def _kernel_quantizes(gemm: Gemm) -> bool:
    """Whether kernels run here and a quantizer takes both operands of a GEMM, to bfloat16."""
    target = current_target()
    if target is None:
        return False
    from mxjax.kernels.quantize.launches import LARGEST_ROTATION

    rotation = gemm.rotation.size if gemm.rotation else 1
    if rotation > LARGEST_ROTATION:
        return False
    if gemm.lhs.is_block16 and gemm.rhs.is_block16:
        lhs, rhs = (get_format(o.format).outer_block for o in (gemm.lhs, gemm.rhs))
        return target.backend != "hip" and lhs == rhs  # nobody has run it there
    return gemm.lhs.is_packable and gemm.rhs.is_packable


def choose_implementation(implementation: Implementation | None) -> Implementation:
    """Returns the named implementation, or for None the fastest here for MXFP4, which it logs once.

    Raises:
      ValueError: the name is unknown.
      NotImplementedError: the implementation does not run here.
    """
    if implementation is None:
        name = _fastest(current_target())
        _log_choice(name)
        return name
    if implementation not in get_args(Implementation):
        names = ", ".join(get_args(Implementation))
        raise ValueError(f"unknown implementation {implementation!r}; use one of {names}, or None")
    if implementation == "triton" and current_target() is None:
        raise NotImplementedError(
            "implementation 'triton' needs a GPU and Triton (install mxjax[cuda] or mxjax[rocm]); "
            "use 'xla', or None for the fastest that runs here"
        )
    if implementation == "aiter" and not _has_aiter():
        raise NotImplementedError(
            "implementation 'aiter' needs a gfx950 GPU (MI355X) and jax-aiter, built from "
            "github.com/ROCm/jax-aiter; use 'triton', or None for the fastest that runs here"
        )
    return implementation


def _has_aiter() -> bool:
    target = current_target()
    if target is None or target.arch != "gfx950":
        return False
    from mxjax.kernels.matmul import aiter

    return aiter.is_available(target)


def _fastest(target: Target | None) -> Implementation:
    """Returns "triton" where MXFP4 is native, else "fp8_carriers" on CUDA with FP8, else "xla"."""
    if target is None:
        return "xla"
    if target.arch == "gfx950" or target.arch.startswith(("sm_100", "sm_103")):
        return "triton"
    return "fp8_carriers" if target.backend == "cuda" and target.has_fp8 else "xla"


@cache
def _log_choice(name: Implementation) -> None:
    _log.info("mxjax.dot runs its GEMMs by implementation=%r", name)
    if jax.default_backend() == "gpu" and not has_triton():
        _log.warning("Triton is not installed: install mxjax[cuda] or mxjax[rocm] for the fast kernels")


def check_remat(mode: Remat, policies: Iterable[Policy], implementation: Implementation | None) -> None:
    """Raises ValueError if `mode` is "fp4" and no layer would keep packed operands."""
    policies = tuple(policies)
    if mode != "fp4" or any(_keeps_packed(policy, implementation) for policy in policies):
        return
    used = {name for policy in policies for name in implementations_of(policy, implementation)}
    if used & set(ON_PACKED):
        raise ValueError(
            "remat 'fp4' would keep no operands: these policies' gradients read x and w themselves, not "
            "packed MXFP4 operands, and their Fprop takes none; use remat 'dots' or 'full'"
        )
    raise ValueError(
        "remat 'fp4' keeps packed MXFP4 operands, but no GEMM of these policies takes them with "
        f"implementation {choose_implementation(implementation)!r}; use a policy in MXFP4 with "
        "implementation 'fp8_carriers' (anywhere) or 'triton' (GPUs), or remat 'dots' or 'full'"
    )


def _keeps_packed(policy: Policy, implementation: Implementation | None) -> bool:
    """Whether a layer keeps packed operands of the Fprop, or of a backward GEMM in place of x or w."""
    fprop, dgrad, wgrad = (name in ON_PACKED for name in implementations_of(policy, implementation))
    x_is_read, w_is_read = gradients_read_tensors(policy)
    return fprop or (wgrad and not x_is_read) or (dgrad and not w_is_read)
