"""AMD's MXFP4 GEMM from the AITER library, where jax-aiter is installed, which no package index has.

Importing `jax_aiter.gemm_fp4` registers the custom call, which takes no attributes:

    GemmFp4FwdJA(lhs [m, k / 2], rhs [n, k / 2], lhs_scales, rhs_scales) -> [m, n] bfloat16

rhs has its bytes in tiles of 16 rows by 16 bytes. Scales have the order of gfx950's matrix instructions and
are padded to 256 rows and 8 blocks. The library chooses the kernel; one that splits k adds up in bfloat16.

Source: ROCm/jax-aiter, csrc/ffi/gemm_fp4/gemm_fp4_ja.cu and jax_aiter/gemm_fp4/fp4_utils.py.
"""

import functools
import importlib

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, UInt8

from mxjax.numerics.formats import BLOCK
from mxjax.runtime.devices import Target

CALL = "GemmFp4FwdJA"
ROWS, DEPTH = 256, 256
"""n and k are multiples of these, which all of AITER's tiles need at most."""


def is_available(target: Target | None) -> bool:
    """Whether AITER's GEMM is registered, and the target is gfx950."""
    return target is not None and target.arch == "gfx950" and _is_registered()


@functools.cache
def _is_registered() -> bool:
    try:
        importlib.import_module("jax_aiter.gemm_fp4")
    except (ImportError, OSError):  # absent, or its libraries are not built
        return False
    return True


def takes(m: int, n: int, k: int, batch: int) -> bool:
    """Whether AITER's GEMM takes these sizes."""
    return batch == 1 and m > 0 and n > 0 and not n % ROWS and not k % DEPTH


def multiply(
    lhs: UInt8[Array, "1 m _"],
    lhs_scales: UInt8[Array, "1 _ _"],
    rhs: UInt8[Array, "1 n _"],
    rhs_scales: UInt8[Array, "1 _ _"],
) -> BFloat16[Array, "1 m n"]:
    """Returns lhs @ rhs.T, summed in float32 and rounded to bfloat16.

    Args:
      lhs_scales, rhs_scales: in the order of `mxjax.kernels.matmul.fp4_gemm.shuffle_scales` for gfx950.
    Raises:
      NotImplementedError: sizes that AITER's GEMM does not take.
    """
    batch, m, half = lhs.shape
    n, k = rhs.shape[1], 2 * half
    if not takes(m, n, k, batch):
        raise NotImplementedError(
            f"implementation 'aiter' needs n and k in multiples of {ROWS} and {DEPTH}, and no batch, got "
            f"[{batch}, {m}, {k}] @ [{batch}, {k}, {n}]; use 'triton', or None for the fastest"
        )
    call = jax.ffi.ffi_call(CALL, jax.ShapeDtypeStruct((m, n), jnp.bfloat16))
    scales = (_by_rows(t[0], k // BLOCK) for t in (lhs_scales, rhs_scales))
    return call(lhs[0], _in_tiles(rhs[0]), *scales)[None]


def _in_tiles(packed: UInt8[Array, "n _"]) -> UInt8[Array, "n _"]:
    """Returns rhs with tiles of 16 rows by 16 bytes one after another, two along k for each of the rows."""
    n, half = packed.shape
    return packed.reshape(n // 16, 16, half // 32, 2, 16).transpose(0, 2, 3, 1, 4).reshape(n, half)


def _by_rows(scales: UInt8[Array, "_ _"], blocks: int) -> UInt8[Array, "rows _"]:
    """Returns scales with the runs of 32 rows by 8 blocks in the order of the rows, not of k."""
    runs = scales.reshape(blocks // 8, -1, 256)
    return runs.swapaxes(0, 1).reshape(-1, blocks)
