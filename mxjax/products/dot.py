"""`dot`: a linear layer's matrix product, each of its three GEMMs in the precision that a policy names."""

import math
import operator
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from mxjax.numerics.array import MXArray, check_parts
from mxjax.numerics.blocks import resolve_block_shape
from mxjax.numerics.delayed import Scales
from mxjax.numerics.formats import get_format
from mxjax.policy.policy import Policy
from mxjax.products.implementations import GemmImplementations, Implementation, implementations_of
from mxjax.products.linear import Options, linear
from mxjax.recipes import as_policy
from mxjax.runtime.arguments import check_arrays
from mxjax.runtime.keys import check_one_key
from mxjax.runtime.mesh import Layout, check_layout, on_auto_axes, varying_as

AnyArray = jax.Array | np.ndarray
DimensionNumbers = tuple  # ((lhs contracting, rhs contracting), (lhs batch, rhs batch)), as in jax.lax


def dot(
    x: Shaped[AnyArray, "*batch d_in"],
    w: Shaped[AnyArray, "..."] | MXArray,
    *,
    policy: Policy | str,
    key: jax.Array | None = None,
    implementation: Implementation | None = None,
    preferred_element_type: DTypeLike | None = None,
    layout: Layout | None = None,
    scales: Scales | None = None,
) -> Float[Array, "*batch _"]:
    """Returns `x @ w`, with each of the three GEMMs (forward and gradients) in the policy's precision.

    Equivalent, for one GEMM and up to the order of float32 sums, to

        lhs, rhs = (rotate(pad(t), axis=contracted) for t in (x, w))      # if the policy rotates
        dequantize(quantize(lhs, axis=-1)) @ dequantize(quantize(rhs, axis=0))

    Each GEMM rotates and quantizes its operands along the axis that it contracts (see `mxjax.policy`). That
    axis is padded with zeros to whole blocks and rotations, which changes no result. Wgrad contracts the
    tokens: all leading axes of x, flattened.

    Args:
      x: activations, float32, bfloat16 or float16. float64, if JAX has it enabled, is rounded to float32.
      w: weights [d_in, d_out], in any of these dtypes; pass float32 master weights, which are quantized from
        the dtype given. Or an `MXArray` [d_in, d_out], a frozen weight without a gradient, by
        `quantize(w, policy.fprop.rhs, axis=0)`: its values are quantized again as the policy says, with a
        warning if the Fprop rounds to 4 bits twice. Dgrad does, if in 4 bits: its blocks lie along d_out.
      policy: a `Policy` or its name.
      key: JAX key for policies that draw random bits. The same key draws the same bits: fold in the step and
        the layer.
      implementation: how the MXFP4 products run, by default the fastest here. All multiply the same values
        and accumulate in float32, of which a GPU may round y and dx to bfloat16 before it applies scales of
        tensors and prescales: "reference" in float32, the definition; "xla" in bfloat16, exactly;
        "fp8_carriers" in FP8, rows that it does not hold once more, unless that is below rounding; "triton",
        "scaled_dot" in packed FP4; "aiter" in packed FP4 by AMD's GEMM, rounding results to bfloat16.
      preferred_element_type: dtype of the result, by default `jnp.result_type(x, w)`; for an `MXArray`, x's.
      layout: on a mesh with Auto axes, how w is sharded where it is stored and where GEMMs read it.
      scales: factors of x, w and dy, for policies with scaling "delayed"; see `mxjax.numerics.delayed`. Pass
        each call its own: JAX adds the gradients of several, which are the tensors' largest magnitudes.

    Gradients have the dtypes of x and w. Under vmap of x the mapped axis joins the tokens, of x and w it is a
    batch axis. Under vmap of a gradient or key each call has its own Wgrad, tensor scales and random bits.

    Special values: a block with NaN or infinity makes every result that it enters NaN. On the CPU, quantized
      values below 2**-126, float32's smallest normal number, count as zero, though `dequantize` keeps them.
    Sharding: meshes with Auto and with Explicit axes give the values of one device. With Explicit axes
      gradients have the shardings of x and w; with Auto axes XLA chooses them, as for `x @ w`, unless
      `layout` names them. Under `jax.shard_map` each shard is quantized by itself: fold
      `jax.lax.axis_index` into its key.
    Raises:
      ValueError: shapes that do not match, an unknown policy or implementation, a policy that draws random
        bits without a key, or one with delayed scales without any; a layout whose mesh is not set or lacks
        one of its axes. For an `MXArray` see `dequantize`, too.
      TypeError: x or w is no array or in another dtype, such as FP8, the result's dtype is not floating
        point, key is not a JAX key, layout no `Layout`, or scales no `Scales`; forward mode.
      NotImplementedError: an implementation that does not run here or does not take the policy's formats; a
        second derivative.
    Source: arXiv 2605.09825, section 3; arXiv 2502.20586, algorithm 3.
    """
    check_arrays("dot", x=x, **({} if isinstance(w, MXArray) else {"w": w}))
    if x.ndim < 1 or len(w.shape) != 2 or x.shape[-1] != w.shape[0]:
        raise ValueError(f"dot needs x [..., d_in] and w [d_in, d_out], got {x.shape} and {w.shape}")
    policy = as_policy(policy)
    check_floating(x, w, preferred_element_type)
    check_key(policy, key, scales)
    check_layout("dot", layout)
    gemms = implementations_of(policy, implementation)
    if isinstance(w, MXArray):
        check_parts("dot", w)
        warn_of_two_roundings(w, policy)
    contract_last = (((x.ndim - 1,), (0,)), ((), ()))
    return _dot_general(x, w, contract_last, None, preferred_element_type, policy, gemms, layout, key, scales)


def dot_general(
    lhs: Shaped[AnyArray, "..."],
    rhs: Shaped[AnyArray, "..."],
    dimension_numbers: DimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    policy: Policy | str,
    key: jax.Array | None = None,
    implementation: Implementation | None = None,
    layout: Layout | None = None,
) -> Float[Array, "..."]:
    """Returns `jax.lax.dot_general` of lhs and rhs, quantized by a policy like x and w in `dot`.

    Any contracting and batch axes are allowed. Several contracting axes are flattened in their order and
    quantized as one. The result has the batch axes, lhs's free axes, then rhs's free axes.

    Args:
      precision: precision of the products; it matters only where a policy keeps operands in float32.
      layout: sharding of an rhs with two axes, [contracting, free].
      Others: see `dot` and `jax.lax.dot_general`.
    Raises: see `dot`; ValueError for negative axes.
    """
    check_arrays("dot_general", lhs=lhs, rhs=rhs)
    policy = as_policy(policy)
    check_floating(lhs, rhs, preferred_element_type)
    check_key(policy, key)
    check_axes(lhs, rhs, dimension_numbers)
    check_layout("dot_general", layout)
    gemms = implementations_of(policy, implementation)
    return _dot_general(
        lhs, rhs, dimension_numbers, precision, preferred_element_type, policy, gemms, layout, key
    )


def _dot_general(
    lhs,
    rhs,
    dimension_numbers: DimensionNumbers,
    precision: lax.PrecisionLike,
    preferred_element_type: DTypeLike | None,
    policy: Policy,
    gemms: GemmImplementations,
    layout: Layout | None,
    key: jax.Array | None,
    scales: Scales | None = None,
) -> jax.Array:
    """Groups the axes of arguments that were checked where users call, so that tracebacks are short."""
    lhs = jnp.asarray(lhs)
    rhs = lax.stop_gradient(rhs) if isinstance(rhs, MXArray) else jnp.asarray(rhs)
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_free = _remaining_axes(lhs, lhs_contract, lhs_batch)
    rhs_free = _remaining_axes(rhs, rhs_contract, rhs_batch)
    dtype = result_dtype(lhs, rhs) if preferred_element_type is None else jnp.dtype(preferred_element_type)
    dtypes = (dtype, lhs.dtype, dtype if isinstance(rhs, MXArray) else rhs.dtype)
    options = Options(policy, gemms, dtypes, precision, layout)
    shape = [lhs.shape[i] for i in (*lhs_batch, *lhs_free)] + [rhs.shape[i] for i in rhs_free]

    def product(lhs, rhs, key, scales):
        # shard_map sums the gradients of replicated operands once they are varying.
        arrays = jax.tree.leaves((lhs, rhs, key))
        lhs, rhs = (jax.tree.map(lambda t: varying_as(t, *arrays), operand) for operand in (lhs, rhs))
        x = _group_axes(lhs, lhs_batch, lhs_free, lhs_contract)
        if isinstance(rhs, MXArray):
            leaves, frozen = jax.tree.flatten(rhs)
            return linear(options._replace(frozen=frozen), x, tuple(leaves), key, scales).reshape(shape)
        w = _group_axes(rhs, rhs_batch, rhs_contract, rhs_free)
        return linear(options, x, w, key, scales).reshape(shape)

    product = on_auto_axes(product, lhs, rhs, kept=((*lhs_batch, *lhs_free), rhs_free))
    return product(lhs, rhs, key if policy.needs_key else None, scales if policy.delayed else None)


def check_key(policy: Policy, key: object, scales: Scales | None = None) -> None:
    """Raises ValueError if the policy lacks its key or its scales, TypeError if they are of another type."""
    if policy.delayed and scales is None:
        raise ValueError(
            f"the policy's scales of {', '.join(policy.delayed)} come from earlier steps: give them to "
            "mxjax.dot as scales=, from mxjax.numerics.delayed; or use a policy with current scales, such as "
            "'fp8'"
        )
    if not (scales is None or isinstance(scales, Scales)):
        raise TypeError(f"scales= must be mxjax.numerics.delayed.Scales, got {type(scales).__name__}")
    if policy.needs_key and key is None:
        raise ValueError(
            f"the policy draws random bits in {policy.drawing} and needs key=; "
            "pass jax.random.key(0), folded with the step and the layer"
        )
    if key is not None:
        check_one_key(key)


def check_floating(lhs: AnyArray | MXArray, rhs: AnyArray | MXArray, dtype: DTypeLike | None) -> None:
    """Raises TypeError unless the operands are float32, bfloat16 or float16, and the result floating point.

    float64, where JAX has it enabled, is accepted too, and rounded.
    """
    for name, x in (("lhs (x)", lhs), ("rhs (w)", rhs)):
        if not isinstance(x, MXArray) and not _is_operand(x.dtype):
            raise TypeError(
                f"mxjax.dot needs float32, bfloat16 or float16, but {name} is {x.dtype}; cast it first"
            )
    if dtype is not None and not _is_floating(dtype):
        raise TypeError(
            f"mxjax.dot needs a floating-point preferred_element_type, such as jnp.bfloat16, got {dtype!r}"
        )


def _is_floating(dtype: DTypeLike) -> bool:
    """Whether this is a floating-point dtype, or the name of one."""
    try:
        return jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:  # no dtype
        return False


def _is_operand(dtype: DTypeLike) -> bool:
    """Whether a dtype is floating point of 16 bits or more: narrower ones need scales."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 16


def check_axes(lhs, rhs, dimension_numbers: DimensionNumbers) -> None:
    """Raises an error unless these are axes of lhs and rhs, counted from 0, and those of a pair match.

    Raises:
      TypeError: the dimension numbers are no two pairs of sequences of integers.
      ValueError: an axis that is not there or is named twice, or two of another size.
    """
    try:
        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
        sides = [[*map(operator.index, (*c, *b))] for c, b in zip(*dimension_numbers, strict=True)]
    except (TypeError, ValueError):
        raise TypeError(
            "dot_general needs dimension_numbers ((lhs contracting, rhs contracting), (lhs batch, rhs "
            f"batch)), each a sequence of axes, got {dimension_numbers!r:.60}"
        ) from None
    for x, axes in zip((lhs, rhs), sides, strict=True):
        if not all(0 <= axis < x.ndim for axis in axes):
            raise ValueError(
                f"dot_general needs axes counted from 0 of {lhs.shape} and {rhs.shape}, got "
                f"{dimension_numbers}; write lhs.ndim - 1 for the last"
            )
        if len(set(axes)) < len(axes):
            raise ValueError(f"dot_general needs each axis once, got {dimension_numbers}")
    if [[lhs.shape[i] for i in axes] for axes in (lhs_contract, lhs_batch)] != [
        [rhs.shape[i] for i in axes] for axes in (rhs_contract, rhs_batch)
    ]:
        raise ValueError(f"dot_general: {lhs.shape} and {rhs.shape} do not match along {dimension_numbers}")


def result_dtype(lhs: jax.Array, rhs: jax.Array | MXArray) -> DTypeLike:
    """Returns JAX's standard promotion of both dtypes, even where a program forbids implicit promotion."""
    if isinstance(rhs, MXArray):
        return lhs.dtype
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(lhs, rhs)


def _remaining_axes(x, contract, batch) -> tuple[int, ...]:
    return tuple(i for i in range(len(x.shape)) if i not in (*contract, *batch))


def _group_axes(x, batch, *groups):
    """Returns x with each group of axes merged into one, after one for the batch axes, if any."""
    x = x.transpose(*batch, *(i for group in groups for i in group))
    shape = [math.prod(x.shape[: len(batch)])] if batch else []
    start = len(batch)
    for group in groups:
        shape.append(math.prod(x.shape[start : start + len(group)]))
        start += len(group)
    return x.reshape(shape)


def warn_of_two_roundings(w: MXArray, policy: Policy) -> None:
    """Warns of a weight [d_in, d_out] in 4 bits which the Fprop rounds to other values of 4 bits.

    No warning if the Fprop keeps the values: with the same format and prescale, and its blocks equal to the
    weight's or, with scales that are powers of two, within them. A rotation, after which no blocks would fit,
    is left alone. An array does not say by which rule its scales were chosen, so that is not compared.
    """
    operand = policy.fprop.rhs
    formats = get_format(w.format), get_format(operand.format)
    if policy.fprop.rotation or any(f.element is None or f.element.bits != 4 for f in formats):
        return
    rows, length = w.block_shape
    has = (length, rows) if w.axis == -2 else (rows, length)
    d_out, d_in = resolve_block_shape(formats[1], operand.block_shape, 2, -2)
    wanted = (d_in, d_out)
    fits = has == wanted or (formats[1].scale == "e8m0" and all(map(_holds, has, wanted, w.shape)))
    if w.format == operand.format and w.prescale == operand.prescale and fits:
        return
    warnings.warn(
        f"dot rounds this frozen weight to 4 bits twice: it is in {w.format} with blocks of {_named(has)}, "
        f"the policy has {operand.format} with {_named(wanted)}; make it with the policy's own operand: "
        "mxjax.quantize(w, policy.fprop.rhs, axis=0)",
        stacklevel=3,
    )


def _holds(block: int, other: int, size: int) -> bool:
    """Whether blocks of `other` elements lie within blocks of `block` along an axis; 0 is the whole axis."""
    return not block or block >= size or bool(other and block % other == 0)


def _named(block: tuple[int, int]) -> str:
    along_d_in, along_d_out = block
    return f"{along_d_in or 'all'} along d_in x {along_d_out or 'all'} along d_out"
