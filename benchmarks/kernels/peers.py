"""Other libraries' casts to MXFP4, quantized linear layers and attention, to compare with.

Each has a name and a function that makes it, which raises if a package is missing or cannot run here.
torchao's Triton and CUDA casts write MXFP8 and need sm_100; its MXFP4 cast uses PyTorch operations.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.kernels.selftest.measured import Checked
from mxjax.numerics.array import dequantize
from mxjax.numerics.quantize import quantize
from mxjax.operands.kernel_operand import pack_by_definition
from mxjax.operands.use import OperandUse


def casts(x: jax.Array) -> dict[str, tuple[int, Callable[[], Checked]]]:
    """Returns the casts of x [rows, columns] bfloat16 by name: bytes moved, and the function that checks
    them.

    The error of a cast is the share of elements or bytes that are not mxjax's under the same scale rule.
    """
    packed = x.nbytes + x.size // 2 + x.size // 32
    values = 2 * x.nbytes
    return {
        "copy, torch": (values, lambda: _torch_cast(x, lambda t: t.clone(), lambda: x)),
        "rows, torchao to_mx, torch.compile": (packed, lambda: _torchao(x, -1, compiled=True)),
        "columns, torchao to_mx, torch.compile": (packed, lambda: _torchao(x, -2, compiled=True)),
        "rows, torchao to_mx, eager": (packed, lambda: _torchao(x, -1, compiled=False)),
        # qwix keeps the scales in x's dtype.
        "rows, qwix.quantize": (packed + x.size // 32, lambda: _qwix_cast(x)),
    }


def _torch_cast(x: jax.Array, cast, wanted: Callable[[], jax.Array], compiled=False, differs=None) -> Checked:
    import torch

    def share(result) -> float:
        return float((result != _to_torch(wanted())).sum()) / result.numel()

    def wait(result) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    cast = torch.compile(cast, dynamic=False) if compiled else cast
    run = functools.partial(cast, _to_torch(x))
    return Checked(run, (differs or share)(run()), wait=wait)


def _to_torch(x: jax.Array):
    """Returns x as a tensor on the GPU, if torch sees one."""
    import torch

    array = np.array(x)
    if x.dtype == jnp.bfloat16:
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array)
    return tensor.to("cuda" if torch.cuda.is_available() else "cpu")


def attentions(is_masked: bool) -> dict[str, Callable[..., Checked]]:
    """Returns PyTorch's attention by name: each takes q, k, v and dout, `first_key`, and whether to derive.

    The result of a run is a tuple of the output [B, S, N, H] and the gradients of q, k and v. FlashAttention,
    which `scaled_dot_product_attention` runs, has no other mask than the causal one.
    """
    flex = {"flex_attention, torch.compile": functools.partial(_torch_attention, _flex_attention)}
    return flex if is_masked else flex | {"SDPA, FlashAttention": functools.partial(_torch_attention, _sdpa)}


def _torch_attention(make, tensors, first_key, with_gradients: bool) -> Checked:
    import torch

    q, k, v, dout = (_to_torch(x).transpose(1, 2).contiguous() for x in tensors)
    attend = make(q, None if first_key is None else _to_torch(first_key))
    for x in (q, k, v):
        x.requires_grad_(with_gradients)

    def run():
        out = attend(q, k, v)
        gradients = torch.autograd.grad(out, (q, k, v), dout) if with_gradients else ()
        return tuple(x.transpose(1, 2) for x in (out, *gradients))

    return Checked(run, wait=lambda _: torch.cuda.synchronize())


def _sdpa(q, _):
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend(q, k, v):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return attend


def _flex_attention(q, first_key):
    import torch
    from torch.nn.attention import flex_attention as flex

    def seen(b, h, query, key):
        return (key <= query) & (True if first_key is None else first_key[b, query] <= key)

    batch = None if first_key is None else q.shape[0]
    blocks = flex.create_block_mask(seen, batch, None, q.shape[2], q.shape[2], device=q.device)
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    return functools.partial(compiled, block_mask=blocks, enable_gqa=True)


def _torchao(x: jax.Array, axis: int, compiled: bool) -> Checked:
    import torch
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    def cast(t):
        t = t.t().contiguous() if axis == -2 else t
        scales, elements = to_mx(t, torch.float4_e2m1fn_x2, 32)  # by floor, its default
        return elements, scales

    def differs(result) -> float:
        packed = pack_by_definition(x, OperandUse(axis))
        pairs = zip(result, map(_to_torch, (packed.elements, packed.scales)), strict=True)
        return max(float((a.view(torch.uint8) != b).sum()) / b.numel() for a, b in pairs)

    return _torch_cast(x, cast, lambda: x, compiled, differs)


def _qwix_cast(x: jax.Array) -> Checked:
    import qwix

    cast = jax.jit(lambda x: qwix.quantize(x, "mxfp4", channelwise_axes=(0,), tiled_axes={1: 32}))

    run = functools.partial(cast, x)
    wanted = dequantize(quantize(x, scale_rule="rceil"), x.dtype)  # its ceil(log2(amax / 6))
    return Checked(run, float(jnp.mean(qwix.dequantize(run()) != wanted)))


def linears() -> dict[str, Callable[[jax.Array, jax.Array], Any]]:
    """Returns quantized products of x [tokens, d_in] bfloat16 and w [d_in, d_out] float32, by name."""
    mxfp4: dict[str, Any] = {"tile_size": 32}
    mxfp4["additional_qt_config"] = {  # blocks and MXFP4 in the backward GEMMs too
        "dlhs_tile_size": 32,
        "drhs_tile_size": 32,
        "dlhs_residual_qtype": "mxfp4",
        "drhs_residual_qtype": "mxfp4",
        "use_original_residuals": True,
    }
    return {
        "jax.nn.scaled_dot_general, mxfp8": _scaled_dot_general,
        "qwix QtProvider, fp8": functools.partial(_qwix, "float8_e4m3fn", "float8_e5m2", {}),
        "qwix QtProvider, int8": functools.partial(_qwix, "int8", "int8", {}),
        "qwix QtProvider, mxfp4": functools.partial(_qwix, "mxfp4", "mxfp4", mxfp4),
    }


def _scaled_dot_general(x, w):
    """Multiplies as jax.nn.scaled_dot_general documents."""
    configs = [jax.nn.get_scaled_dot_general_config("mxfp8")] * 3
    contract = (((1,), (0,)), ((), ()))
    w = w.astype(jnp.bfloat16)
    return jax.nn.scaled_dot_general(x, w, contract, preferred_element_type=jnp.bfloat16, configs=configs)


def _qwix(qtype: str, gradient: str, more: dict[str, Any], x, w):
    """Applies a Dense layer under qwix's training with quantized weights, activations and gradients."""
    import flax.linen as nn
    import qwix

    rule = qwix.QtRule(module_path=".*", weight_qtype=qtype, act_qtype=qtype, bwd_qtype=gradient, **more)
    dense = nn.Dense(w.shape[1], use_bias=False, dtype=jnp.bfloat16)
    return qwix.quantize_model(dense, qwix.QtProvider([rule])).apply({"params": {"kernel": w}}, x)


def grouped_by_torch(x: tuple[int, ...], w: tuple[int, ...], sizes: np.ndarray) -> Checked:
    """Returns the three products by PyTorch of random tensors of these shapes, with the casts of w and dw."""
    import torch

    (m, _), (g, k, n) = x, w
    ends = torch.tensor(np.cumsum(sizes), device="cuda", dtype=torch.int32)
    x_, dy = (torch.randn(m, width, device="cuda", dtype=torch.bfloat16) for width in (k, n))
    w_ = torch.randn(g, k, n, device="cuda")

    def run():
        w16 = w_.bfloat16()
        y = torch._grouped_mm(x_, w16, offs=ends)
        dx = torch._grouped_mm(dy, w16.transpose(1, 2), offs=ends)
        return y, dx, torch._grouped_mm(x_.T, dy, offs=ends).float()

    return Checked(run, wait=lambda _: torch.cuda.synchronize())
