"""Tokens that travel to their experts as packed MXFP4: the values that gate_up's Fprop multiplies.

Quantization leaves values that it gave as they are. So the Fprop multiplies what arrives as it would multiply
the tokens themselves, and so does a Wgrad that reads the values that the Fprop quantized. All results have
the bits of tokens that travel whole, from 4.25 instead of 16 bits an element. Results and gradients travel
whole.

Shapes in names as in `models.experts.layer`; W bytes of a row.
"""

import math
from collections.abc import Mapping
from typing import Literal

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from models.configs import DecoderConfig
from models.sharding import RULES
from mxjax.numerics.formats import BLOCK
from mxjax.numerics.operand import Operand
from mxjax.operands.kernel_operand import KernelOperand, decode
from mxjax.operands.use import OperandUse
from mxjax.policy import Policy
from mxjax.policy.layers import LayerPolicies
from mxjax.products.prepare import prepare

Traffic = Literal["fp4"]
_BLOCK_BYTES = BLOCK // 2 + 1  # codes and a scale


def pack_rows(x: Float[Array, "T D"], operand: Operand) -> UInt8[Array, "T W"]:
    """Returns the codes of each row, quantized along D as `operand` says, and then its scales."""
    [q] = prepare(x, [OperandUse(-1, operand, form="packed")])
    assert isinstance(q, KernelOperand)
    return jnp.concatenate(q.packed, axis=1)


def unpack_rows(rows: UInt8[Array, "T W"], width: int, dtype: DTypeLike) -> Float[Array, "T {width}"]:
    """Returns the values of rows that `pack_rows` packed, which bfloat16 represents; zeros of zero bytes."""
    elements, scales = jnp.split(rows, [row_bytes(width) // _BLOCK_BYTES * (BLOCK // 2)], axis=1)
    return decode(KernelOperand(elements, scales), dtype)[:, :width]


def row_bytes(width: int) -> int:
    """Returns W, the bytes of a packed row of so many elements."""
    return -(-width // BLOCK) * _BLOCK_BYTES


def check_traffic(traffic: Traffic | None, policies: LayerPolicies, owners: int) -> None:
    """Raises ValueError unless packed tokens give every layer's results, on a mesh with so many `owners`."""
    if traffic is None:
        return
    if owners == 1:
        raise ValueError(
            f"--expert-traffic {traffic} packs tokens that travel along the mesh axis expert; add --mesh "
            "expert=N, or leave it out"
        )
    routed = [name.removesuffix("router") for name, _ in policies.items() if name.endswith("mlp.router")]
    for name in (f"{block}gate_up" for block in routed):
        if (reason := _inexact(policies[name])) is not None:
            raise ValueError(f"--expert-traffic {traffic} cannot give {name} its own results: {reason}")


def _inexact(policy: Policy) -> str | None:
    """Returns why packed tokens would change the policy's results, and what to do; None if they do not."""
    x, seen = policy.fprop.lhs, policy.wgrad.lhs
    is_row = x.is_packable and not x.is_square and x.rounding == "nearest" and x.prescale is None
    if not is_row or policy.fprop.rotation is not None:
        rotated = f" ({policy.fprop.rotation})" if policy.fprop.rotation else ""
        return (
            "its Fprop must round x to nearest MXFP4 in blocks of 32 along the features, without rotation or "
            f"prescale, and reads {x}{rotated}; take another policy, such as tetrajet, or leave it out"
        )
    if seen.source != "dequantized":
        return (
            f"its Wgrad reads {seen} of the tokens themselves, which do not arrive; let it read what the "
            "Fprop quantized, by --set wgrad.lhs.source=dequantized, or leave it out"
        )
    return None


def traffic_text(
    config: DecoderConfig, sizes: Mapping[str, int], tokens: int, traffic: Traffic | None
) -> list[str]:
    """Returns a line with the bytes that each device sends to others in the forward pass of a step.

    Loads are taken as even. No line unless a mesh of these sizes shards experts.

    Args:
      tokens: those of a step on all devices.
    """
    if config.experts is None or sizes["expert"] == 1:
        return []
    devices = math.prod(sizes[axis] for axis in RULES["rows"] or ())
    rows = (config.n_layers - config.n_dense) * tokens * config.experts.active * (devices - 1) // devices**2
    whole, packed = 2 * rows * config.d_model, rows * row_bytes(config.d_model)
    there = f"{whole:,} bytes of tokens"
    if traffic is not None:
        there = f"{packed:,} bytes of tokens in MXFP4, not {whole:,},"
    return [f"experts: in a step's forward pass a device sends others {there} and {whole:,} of results"]
