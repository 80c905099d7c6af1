"""AMD's fused attention from the AITER library, in builds of JAX for ROCm that have `jax._src.aiter`.

Importing that module registers two custom calls, whose arguments and attributes are written down here. The
backward pass adds to float32 atomically, so its last bits differ from run to run. AITER's deterministic
variant would keep a copy of dq for every 128 keys, 17 GB for 2 x 8192 tokens with 32 heads of 128. Where XLA
is told to be deterministic, AITER counts as absent.

Source: ROCm/jax, jax/_src/aiter/aiter_mha.py and jaxlib/gpu/hip_aiter_mha_{fwd,bwd}.cc; jax-ml/jax#37186.
"""

import functools
import importlib
import os

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.runtime.devices import Target

FORWARD, BACKWARD = "hip_mha_fwd_ffi", "hip_mha_bwd_ffi"
_DETERMINISTIC = ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops")
_COMMON = {
    "dropout_p": np.float32(0),
    "is_causal": True,
    "window_size_left": np.int32(-1),
    "window_size_right": np.int32(-1),
    "max_seqlen_q_attr": np.int32(-1),
    "max_seqlen_k_attr": np.int32(-1),
    "zero_tensors": False,
}


def suits(target: Target | None, is_plain: bool = True) -> bool:
    """Whether AITER's kernels are for this target, and attention has no mask or sinks: `is_plain`."""
    return is_plain and target is not None and target.arch == "gfx950"


def is_available(target: Target | None, is_plain: bool = True) -> bool:
    """Whether AITER's kernels suit, are registered, and need not be deterministic."""
    return suits(target, is_plain) and not _must_be_deterministic() and _is_registered()


def _must_be_deterministic() -> bool:
    flags = os.environ.get("XLA_FLAGS", "").split()
    return any(flag in (f"--{name}", f"--{name}=true") for flag in flags for name in _DETERMINISTIC)


@functools.cache
def _is_registered() -> bool:
    try:
        module = importlib.import_module("jax._src.aiter")
    except ImportError:
        return False
    return getattr(module, "flash_attn_func", None) is not None  # None where its libraries do not load


def forward(q, k, v, target: Target | None) -> tuple[jax.Array, jax.Array]:
    """Returns attention's result and the natural logarithm of each query's sum of exp(scores).

    Shapes as in `launches.forward`.
    """
    del target
    b, s, g, r, h = q.shape
    call = jax.ffi.ffi_call(
        FORWARD,
        (
            jax.ShapeDtypeStruct((b, s, g * r, h), q.dtype),
            jax.ShapeDtypeStruct((b, g * r, s), jnp.float32),
            jax.ShapeDtypeStruct((0,), jnp.uint8),  # weights after dropout
            jax.ShapeDtypeStruct((4,), jnp.uint32),  # random state, of which 16 bytes are cleared
        ),
    )
    absent = _absent(jnp.int32, jnp.int32, q.dtype, q.dtype, jnp.float32, jnp.uint32)
    out, lse, *_ = call(
        *(q.reshape(b, s, g * r, h), k, v),
        *absent,  # starts of q and of k, result, bias, slopes, random state
        **_COMMON,
        **_assembly(h),
        softmax_scale=np.float32(h**-0.5),
        return_softmax_lse=True,
        return_dropout_randval=False,
        min_seqlen_q=np.int32(0),
        logits_soft_cap=np.float32(0),
    )
    return out.reshape(q.shape), lse.reshape(b, g, r, s)


def backward(q, k, v, out, lse, dout, target: Target | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of q, k and v."""
    del target
    b, s, g, r, h = q.shape
    whole = (b, s, g * r, h)
    like_q = jax.ShapeDtypeStruct(whole, q.dtype)
    like_k = jax.ShapeDtypeStruct(k.shape, k.dtype)
    sums = jax.ShapeDtypeStruct((b, g * r, s), jnp.float32)
    call = jax.ffi.ffi_call(BACKWARD, (like_q, like_k, like_k, sums, jax.ShapeDtypeStruct((0,), q.dtype)))
    dtypes = (jnp.int32, jnp.int32, q.dtype, q.dtype, q.dtype, q.dtype, jnp.float32, jnp.uint32, jnp.uint32)
    assembly = _assembly(h)
    if r > 1:
        assembly["use_asm_v3"] = False
    dq, dk, dv, *_ = call(
        *(dout.reshape(whole), q.reshape(whole), k, v, out.reshape(whole), lse.reshape(sums.shape)),
        *_absent(*dtypes),  # starts of q and of k, dq, dk, dv, bias, slopes, random state twice
        **_COMMON,
        **assembly,
        softmax_scale=np.float32(h**-0.5),
        deterministic=False,
        is_v3_atomic_fp32=assembly["use_asm_v3"],
    )
    return dq.reshape(q.shape), dk, dv


def _absent(*dtypes) -> list[jax.Array]:
    """Returns empty arrays, which stand for arguments that are not given."""
    return [jnp.zeros((0,), dtype) for dtype in dtypes]


def _assembly(h: int) -> dict[str, object]:
    """Returns whether AITER's assembly kernels run: as in JAX's wrapper, not from heads of 96 on."""
    return {"use_asm_v3": h < 96, "how_v3_bf16_cvt": np.int32(0)}
