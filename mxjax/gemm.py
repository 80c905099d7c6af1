"""One GEMM: its operands as an implementation wants them, then multiplied.

The implementations differ in how they multiply, never in the values that they multiply.
"""

import dataclasses
import importlib.util
import logging
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from mxjax.carriers import Carrier, carry
from mxjax.formats import get_format
from mxjax.layout import Layout, to_multiply
from mxjax.operands import Use, quantize_operand
from mxjax.packed import (
    Packed,
    Values,
    decode,
    kernel_target,
    pack_operands,
    packable,
    power_of_two,
    value_operands,
)
from mxjax.policy import Gemm, Policy
from mxjax.quantize import MXArray, block_values, dequantize

Implementation = Literal["reference", "xla", "fp8", "scaled_dot", "triton"]
How = Literal["reference", "xla", "fp8", "scaled_dot", "triton", "fp8_tensor"]
"""How one GEMM runs: by its implementation, or in FP8 because its operands are, with a scale a tensor."""
Prepared = MXArray | Values | Packed

ON_PACKED: tuple[How, ...] = ("fp8", "scaled_dot", "triton")
"""Those that take packed operands, small enough to be kept from the forward pass for the backward one."""

_log = logging.getLogger("mxjax")


class Plan(NamedTuple):
    """How each GEMM of a policy runs here; hashable."""

    fprop: How
    dgrad: How
    wgrad: How
    kernels: tuple[str, str] | None  # what Triton kernels run on
    layout: Layout | None = None  # of w


def plan(policy: Policy, implementation: Implementation | None, explicit_axes: bool = False) -> Plan:
    """Returns how each GEMM runs; on a mesh with Explicit axes by "xla", unless something else is named.

    Raises:
      ValueError, NotImplementedError: as `choose_implementation`; or the implementation is named, and one of
        the GEMMs has operands that it does not take.
    """
    name = choose_implementation(implementation)
    if explicit_axes and name in ON_PACKED:
        if implementation is not None:
            raise NotImplementedError(
                f"implementation {name!r} does not run on meshes with Explicit axes; use Auto axes, or 'xla'"
            )
        name = "xla"
    hows: list[How] = [_how(name, gemm, implementation is not None) for gemm in policy.gemms.values()]
    return Plan(hows[0], hows[1], hows[2], kernel_target())


def check_plans(policies: Iterable[Policy], implementation: Implementation | None) -> None:
    """Raises what `plan` raises for any of the policies: to learn it before anything is compiled."""
    for policy in policies:
        plan(policy, implementation)


def compiler_options(policies: Iterable[Policy], implementation: Implementation | None) -> dict[str, bool]:
    """Returns options for `jax.jit(compiler_options=)` of a program with GEMMs of these policies.

    Where FP8 matrix units multiply on CUDA, XLA would try Triton's GEMMs for each shape, for minutes, and
    then take cuBLAS's.
    """
    target = kernel_target()
    hows = {how for policy in policies for how in plan(policy, implementation)[:3]}
    if target is None or target.backend != "cuda" or not hows & {"fp8", "fp8_tensor"}:
        return {}
    return {"xla_gpu_enable_triton_gemm": False}


def _how(name: Implementation, gemm: Gemm, explicit: bool) -> How:
    if name in ("reference", "xla"):
        return name
    operands = (gemm.lhs, gemm.rhs)
    if all(packable(o) for o in operands):
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
    return "xla"


def prepare(x: Float[Array, "*batch r c"], uses: Sequence[tuple[How, Use] | None]) -> tuple[Any, ...]:
    """Returns x `Prepared` as each use wants it, in one read where a kernel makes them all; None for None."""
    wanted = [use for use in uses if use is not None]
    if wanted and all(how in ON_PACKED for how, _ in wanted):
        return pack_operands(x, *(use and use[1] for use in uses))
    if wanted and all(how == "xla" for how, _ in wanted) and explicit_sharding(x) is None:
        values = value_operands(x, *(use and use[1] for use in uses))
        if values is not None:
            return values
    return tuple(None if use is None else _prepare_one(x, *use) for use in uses)


def _prepare_one(x, how: How, use: Use) -> Prepared:
    if how in ON_PACKED:
        [packed] = pack_operands(x, use)
        assert packed is not None
        return packed
    return quantize_operand(x, use)


def multiply(
    how: How,
    dtype: DTypeLike,
    precision: lax.PrecisionLike,
    lhs: Prepared,
    rhs: Prepared,
    carriers: tuple[Carrier, Carrier],
    sharding: NamedSharding | None = None,
    layout: Layout | None = None,
) -> Float[Array, "*batch m n"]:
    """Returns the product of two prepared operands over the axes that they were prepared along, in dtype.

    Axes before the last two are batch axes. On a mesh with Explicit axes the result has the `sharding` given;
    with Auto axes, rhs is gathered as its `layout` says, in the form in which it is multiplied.
    """
    if isinstance(rhs, Packed):
        elements, scales = (to_multiply(t, layout) for t in (rhs.elements, rhs.scales))
        rhs = dataclasses.replace(rhs, elements=elements, scales=scales)
    match lhs, rhs:
        case Packed(), Packed() if 0 in (*lhs.elements.shape, *rhs.elements.shape):
            y = _contract(decode(lhs), -1, decode(rhs), -1, precision, sharding)
        case Packed(), Packed():
            run = {"fp8": _multiply_fp8, "scaled_dot": _multiply_scaled_dot, "triton": _multiply_triton}[how]
            exact = lhs.factor is None and rhs.factor is None and dtype in (jnp.bfloat16, jnp.float32)
            y = run(lhs, rhs, dtype if exact else jnp.float32, carriers, sharding)
        case Values(), Values():
            y = _contract(lhs.elements, -1, to_multiply(rhs.elements, layout), -1, precision, sharding)
        case MXArray(), MXArray():
            if how == "reference":
                return _multiply_reference(lhs, rhs, sharding, layout).astype(dtype)
            tensors = how == "fp8_tensor"
            y = (
                _multiply_fp8_tensors(lhs, rhs, sharding, layout)
                if tensors
                else _multiply_xla(lhs, rhs, precision, sharding, layout)
            )
        case _:
            raise TypeError(f"operands prepared alike are needed, got {type(lhs)} and {type(rhs)}")
    for factor in (lhs.factor, rhs.factor):
        y = y if factor is None else y * factor
    return y.astype(dtype)


def _multiply_reference(lhs: MXArray, rhs: MXArray, sharding, layout):
    """The definition: float32 products of the dequantized operands."""
    right = to_multiply(dequantize(rhs), layout)
    return _contract(dequantize(lhs), lhs.axis, right, rhs.axis, lax.Precision.HIGHEST, sharding)


def _multiply_xla(lhs: MXArray, rhs: MXArray, precision, sharding, layout):
    """The values in bfloat16, which holds elements times block scales exactly; without the factors."""
    keep = any(get_format(q.format).dtype == jnp.float32 for q in (lhs, rhs))
    dtype = jnp.float32 if keep else jnp.bfloat16
    precision = lax.Precision.HIGHEST if keep and precision is None else precision
    left, right = (block_values(q).astype(dtype) for q in (lhs, rhs))
    return _contract(left, lhs.axis, to_multiply(right, layout), rhs.axis, precision, sharding)


def _multiply_fp8(lhs: Packed, rhs: Packed, dtype, carriers, sharding):
    """In FP8, or in bfloat16 when the scales of an operand's row span more than its carrier holds."""
    target = kernel_target()
    if target is not None and target.has_fp8:
        from mxjax.kernels import fp8

        return fp8.matmul(lhs.elements, lhs.scales, rhs.elements, rhs.scales, dtype, carriers)
    left, right = carry(lhs, carriers[0]), carry(rhs, carriers[1])
    fits = left.fits & right.fits

    def in_bfloat16():
        return _contract(decode(lhs), -1, decode(rhs), -1, None, sharding).astype(dtype)

    y = lax.cond(fits, lambda: _contract_fp8(left.elements, right.elements, dtype, sharding), in_bfloat16)
    exponent = jnp.where(fits, left.exponent[..., :, None] + right.exponent[..., None, :], 0)
    half = exponent >> 1  # in two factors, since one could overflow
    return y * power_of_two(half).astype(dtype) * power_of_two(exponent - half).astype(dtype)


def _multiply_fp8_tensors(lhs: MXArray, rhs: MXArray, sharding, layout):
    """In FP8, without the scales of the tensors."""
    left, right = (q.elements.astype(get_format(q.format).dtype) for q in (lhs, rhs))
    right = to_multiply(right, layout)
    left, right = (t if q.axis == -1 else t.swapaxes(-1, -2) for t, q in ((left, lhs), (right, rhs)))
    return _contract_fp8(left, right, jnp.float32, sharding)


def _contract_fp8(lhs, rhs, dtype, sharding):
    """Returns lhs @ rhs.T of FP8 operands. HIGHEST: accumulated in no fewer bits than float32 has."""
    return _contract(lhs, -1, rhs, -1, lax.Precision.HIGHEST, sharding, dtype)


def _multiply_scaled_dot(lhs: Packed, rhs: Packed, dtype, carriers, sharding):
    del carriers, sharding
    sides = []
    for q in (lhs, rhs):
        shape = (*q.elements.shape[:-1], 2 * q.elements.shape[-1])
        elements = lax.bitcast_convert_type(q.elements, jnp.float4_e2m1fn).reshape(shape)
        sides.append((elements, lax.bitcast_convert_type(q.scales, jnp.float8_e8m0fnu)))
    (left, left_scale), (right, right_scale) = sides
    batch = tuple(range(left.ndim - 2))
    return lax.scaled_dot(
        left,
        right,
        lhs_scale=left_scale,
        rhs_scale=right_scale,
        dimension_numbers=(((left.ndim - 1,), (right.ndim - 1,)), (batch, batch)),
        preferred_element_type=dtype,
    )


def _multiply_triton(lhs: Packed, rhs: Packed, dtype, carriers, sharding):
    del carriers, sharding
    from mxjax.kernels.gemm import matmul

    return matmul(lhs.elements, lhs.scales, rhs.elements, rhs.scales, dtype)


def _contract(lhs, lhs_axis, rhs, rhs_axis, precision, sharding, dtype=jnp.float32):
    """Returns the product over the two axes (negative), batched over axes before the last two."""
    batch = tuple(range(lhs.ndim - 2))
    dims = (((lhs.ndim + lhs_axis,), (rhs.ndim + rhs_axis,)), (batch, batch))
    return lax.dot_general(
        lhs, rhs, dims, precision=precision, preferred_element_type=dtype, out_sharding=sharding
    )


def explicit_sharding(x: jax.Array) -> NamedSharding | None:
    """Returns x's sharding where it is part of its type (a mesh with Explicit axes), else None."""
    sharding = jax.typeof(x).sharding
    return sharding if sharding.mesh.are_all_axes_explicit and sharding.mesh.axis_names else None


def choose_implementation(implementation: Implementation | None) -> Implementation:
    """Returns the implementation named, or for None the fastest for MXFP4 here, which is logged once.

    Raises:
      ValueError: there is none of that name.
      NotImplementedError: it does not run here.
    """
    if implementation is None:
        name = _fastest(kernel_target())
        _log_choice(name)
        return name
    if implementation not in get_args(Implementation):
        names = ", ".join(get_args(Implementation))
        raise ValueError(f"unknown implementation {implementation!r}; use one of {names}, or None")
    if implementation == "triton" and kernel_target() is None:
        raise NotImplementedError(
            "implementation 'triton' needs a GPU and jax-triton (install mxjax[cuda] or mxjax[rocm]); "
            "use 'xla', or None for the fastest that runs here"
        )
    return implementation


def _fastest(target) -> Implementation:
    """Returns where MXFP4 is native Triton's GEMM, else on CUDA with FP8 its carriers, else "xla"."""
    if target is None:
        return "xla"
    if target.arch == "gfx950" or target.arch.startswith(("sm_100", "sm_103")):
        return "triton"
    return "fp8" if target.backend == "cuda" and target.has_fp8 else "xla"


@cache
def _log_choice(name: Implementation) -> None:
    _log.info("mxjax.dot runs its GEMMs by implementation=%r", name)
    if jax.default_backend() == "gpu" and importlib.util.find_spec("jax_triton") is None:
        _log.warning("jax-triton is not installed: install mxjax[cuda] or mxjax[rocm] for the fast kernels")
