"""AMD's fused attention from the AITER library, where the installed JAX or jax-aiter registers it.

Builds of JAX for ROCm may have `jax._src.aiter`; jax-aiter, which no package index has, has the same two
custom calls by other names. Their arguments and attributes are written down here. Arrays of rank 3 are
documents of packed tokens, whose first tokens `starts` names: q [tokens, N, H], k and v [tokens, G, H], lse
[N, tokens]. A number of documents is part of the program, so spare ones are empty; where more are given, or
`first_key` has windows, the Triton kernels run instead.

The backward pass adds to float32 atomically, so its last bits differ from run to run. AITER's deterministic
variant would keep a copy of dq for every 128 keys, 17 GB for 2 x 8192 tokens with 32 heads of 128. Where XLA
is told to be deterministic, AITER counts as absent.

Sources: ROCm/jax, jax/_src/aiter/aiter_mha.py and jaxlib/gpu/hip_aiter_mha_{fwd,bwd}.cc; jax-ml/jax#37186;
ROCm/jax-aiter at 1f3a0977, jax_aiter/mha/mha.py and csrc/ffi/mha_{fwd,bwd}. They make the lse of documents as
long as the longest one; ROCm/composable_kernel's fmha_fwd_kernel.hpp writes it at each document's start.
"""

import functools
import importlib
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from mxjax.kernels.attention import launches
from mxjax.kernels.launch import ceil_div
from mxjax.runtime.devices import Target

DOCUMENT = 256
"""Mean tokens of the shortest documents that AITER takes. Each document's grid covers a whole sequence."""
_DETERMINISTIC = ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops")
_COMMON = {
    "dropout_p": np.float32(0),
    "is_causal": True,
    "window_size_left": np.int32(-1),
    "window_size_right": np.int32(-1),
    "zero_tensors": False,
    "how_v3_bf16_cvt": np.int32(0),
}


class _Calls(NamedTuple):
    """The names of the custom calls."""

    forward: str
    backward: str


_JAX = _Calls("hip_mha_fwd_ffi", "hip_mha_bwd_ffi")
_JAX_AITER = _Calls("MhaFwdUnifiedJA", "MhaBwdUnifiedJA")


def suits(target: Target | None, with_sinks: bool = False) -> bool:
    """Whether AITER's kernels are for this target, and attention has no sinks."""
    return not with_sinks and target is not None and target.arch == "gfx950"


def is_available(target: Target | None, with_sinks: bool = False) -> bool:
    """Whether AITER's kernels suit, are registered, and need not be deterministic."""
    return suits(target, with_sinks) and not _must_be_deterministic() and _registered() is not None


def _must_be_deterministic() -> bool:
    flags = os.environ.get("XLA_FLAGS", "").split()
    return any(flag in (f"--{name}", f"--{name}=true") for flag in flags for name in _DETERMINISTIC)


@functools.cache
def _registered() -> _Calls | None:
    """Returns the calls that JAX has registered, or that jax-aiter registers now; None if there are none."""
    try:
        module = importlib.import_module("jax._src.aiter")
        if getattr(module, "flash_attn_func", None) is not None:  # None where its libraries do not load
            return _JAX
    except ImportError:
        pass
    try:
        registry = importlib.import_module("jax_aiter.ffi.registry")
        for name in _JAX_AITER:
            registry.register_ffi_target(name, "ROCM")
    except (ImportError, OSError, RuntimeError, ValueError):  # absent, not built, or of another version
        return None
    return _JAX_AITER


def forward(q, k, v, target: Target | None, *, first_key=None) -> tuple[jax.Array, jax.Array]:
    """Returns attention's result and the natural logarithm of each query's sum of exp(scores).

    Arguments as in `launches.forward`.
    """
    if first_key is None:
        return _forward(q, k, v)
    starts, fits = document_starts(first_key)
    masked = functools.partial(launches.forward, target=target, first_key=first_key)
    return jax.lax.cond(fits, functools.partial(_forward, starts=starts), masked, q, k, v)


def backward(
    q, k, v, out, lse, dout, target: Target | None, *, first_key=None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of q, k and v."""
    given = q, k, v, out, lse, dout
    if first_key is None:
        return _backward(*given)
    starts, fits = document_starts(first_key)
    masked = functools.partial(launches.backward, target=target, first_key=first_key)
    return jax.lax.cond(fits, functools.partial(_backward, starts=starts), masked, *given)


def document_starts(first_key: Int32[Array, "B S"]) -> tuple[Int32[Array, " D"], Bool[Array, ""]]:
    """Returns where each document's tokens start among B S, and whether the documents are all of the mask.

    The last entries are B S. The documents are not all if there are more than D - 1, or queries do not see
    all earlier tokens of theirs.
    """
    b, s = first_key.shape
    most = b * ceil_div(s, DOCUMENT)
    position = jax.lax.broadcasted_iota(jnp.int32, (b, s), 1)
    begins = first_key == position
    latest = jax.lax.cummax(jnp.where(begins, position, 0), axis=1)
    [starts] = jnp.nonzero(begins.ravel(), size=most + 1, fill_value=b * s)
    return starts.astype(jnp.int32), (jnp.sum(begins) <= most) & jnp.all(first_key == latest)


def _forward(q, k, v, starts=None) -> tuple[jax.Array, jax.Array]:
    b, s, g, r, h = q.shape
    whole, rows = _shapes(q.shape, starts)
    call = jax.ffi.ffi_call(
        _calls().forward,
        (
            jax.ShapeDtypeStruct(whole, q.dtype),
            jax.ShapeDtypeStruct(rows, jnp.float32),
            jax.ShapeDtypeStruct((0,), jnp.uint8),  # weights after dropout
            jax.ShapeDtypeStruct((4,), jnp.uint32),  # random state, of which 16 bytes are cleared
        ),
    )
    keys = (*whole[:-2], g, h)
    out, lse, *_ = call(
        *(q.reshape(whole), k.reshape(keys), v.reshape(keys)),
        *_starts(starts),
        *_absent(q.dtype, q.dtype, jnp.float32, jnp.uint32),  # result, bias, slopes, random state
        **_common(s, starts),
        use_asm_v3=_assembly(h, starts),
        softmax_scale=np.float32(h**-0.5),
        return_softmax_lse=True,
        return_dropout_randval=False,
        min_seqlen_q=np.int32(0),
        logits_soft_cap=np.float32(0),
    )
    if starts is not None:
        lse = lse.reshape(g, r, b, s).transpose(2, 0, 1, 3)
    return out.reshape(q.shape), lse.reshape(b, g, r, s)


def _backward(q, k, v, out, lse, dout, starts=None) -> tuple[jax.Array, jax.Array, jax.Array]:
    s, g, r, h = q.shape[1:]
    whole, rows = _shapes(q.shape, starts)
    keys = (*whole[:-2], g, h)
    if starts is not None:
        lse = lse.transpose(1, 2, 0, 3)
    like_q = jax.ShapeDtypeStruct(whole, q.dtype)
    like_k = jax.ShapeDtypeStruct(keys, k.dtype)
    sums = jax.ShapeDtypeStruct(rows, jnp.float32)
    call = jax.ffi.ffi_call(
        _calls().backward, (like_q, like_k, like_k, sums, jax.ShapeDtypeStruct((0,), q.dtype))
    )
    # dq, dk, dv, bias, slopes, random state twice
    absent = _absent(q.dtype, q.dtype, q.dtype, q.dtype, jnp.float32, jnp.uint32, jnp.uint32)
    assembly = _assembly(h, starts) and r == 1
    dq, dk, dv, *_ = call(
        *(dout.reshape(whole), q.reshape(whole), k.reshape(keys), v.reshape(keys)),
        *(out.reshape(whole), lse.reshape(rows)),
        *_starts(starts),
        *absent,
        **_common(s, starts),
        use_asm_v3=assembly,
        softmax_scale=np.float32(h**-0.5),
        deterministic=False,
        is_v3_atomic_fp32=assembly,
    )
    return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)


def _calls() -> _Calls:
    calls = _registered()
    assert calls is not None  # `is_available` has found them
    return calls


def _shapes(shape: tuple[int, ...], starts) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of queries and of their rows, for q [B, S, G, R, H]."""
    b, s, g, r, h = shape
    return ((b, s, g * r, h), (b, g * r, s)) if starts is None else ((b * s, g * r, h), (g * r, b * s))


def _starts(starts) -> list[jax.Array]:
    return _absent(jnp.int32, jnp.int32) if starts is None else [starts, starts]


def _absent(*dtypes) -> list[jax.Array]:
    """Returns empty arrays, which stand for arguments that are not given."""
    return [jnp.zeros((0,), dtype) for dtype in dtypes]


def _common(length: int, starts) -> dict[str, object]:
    """Returns the attributes that both calls have alike; the longest document may be `length` tokens."""
    longest = np.int32(-1 if starts is None else length)
    return {**_COMMON, "max_seqlen_q_attr": longest, "max_seqlen_k_attr": longest}


def _assembly(h: int, starts) -> bool:
    """Returns whether AITER's assembly kernels run: as in JAX's wrapper, not from heads of 96 on.

    Nor with documents, where the wrapper leaves most to composable_kernel, whose blocks of empty documents
    return.
    """
    return h < 96 and starts is None
