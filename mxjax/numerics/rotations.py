"""Orthogonal matrices other than Sylvester's, and permutations, for the axis that a GEMM contracts.

Applied to both operands of a GEMM they leave the product unchanged in full precision, as `rotate` does.
XLA computes them; no kernel does.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from mxjax.numerics.hadamard import SIZES

Kind = Literal["hadamard", "sequency", "dct", "haar"]
Order = Literal["given", "fixed", "redrawn"]


@functools.cache
def rotation_matrix(kind: Kind, n: int) -> Float32[np.ndarray, "n n"]:
    """Returns an orthogonal matrix of size n, whose first row is constant.

    | kind | rows |
    | --- | --- |
    | hadamard | `mxjax.hadamard_matrix`, in natural order |
    | sequency | the same, ordered by their number of sign changes |
    | dct | DCT-II: cosines of increasing frequency |
    | haar | Haar wavelets, the longest first |

    Raises:
      ValueError: n is not a power of two from 2 to 256.
    Source: Rao and Yip, Discrete Cosine Transform (1990); Haar (1910).
    """
    if n not in SIZES:
        raise ValueError(f"rotation_matrix needs n to be one of {SIZES}, got {n}")
    if kind == "dct":
        angles = np.pi * np.outer(np.arange(n), np.arange(n) + 0.5) / n
        rows = np.cos(angles) * np.sqrt(2 / n)
        rows[0] /= np.sqrt(2)
    elif kind == "haar":
        rows = np.ones((1, 1))
        while len(rows) < n:
            rows = np.vstack([np.kron(rows, [1, 1]), np.kron(np.eye(len(rows)), [1, -1])]) / np.sqrt(2)
    else:
        rows = np.ones((1, 1))
        while len(rows) < n:
            rows = np.kron([[1, 1], [1, -1]], rows)
        if kind == "sequency":
            rows = rows[np.argsort(np.count_nonzero(np.diff(rows), axis=1))]
        rows = rows / np.sqrt(n)
    return rows.astype(np.float32)


def apply_matrix(
    x: Float[Array, "*shape"],
    matrix: Float32[np.ndarray, "n n"],
    axis: int,
    signs: Float32[Array, " n"] | None = None,
) -> Float32[Array, "*shape"]:
    """Returns x with each run v of n elements along `axis` replaced by matrix @ (signs * v), in float32.

    Args:
      axis: -1 or -2; n divides it.
    """
    n, shape = len(matrix), x.shape
    runs = x.astype(jnp.float32).swapaxes(axis, -1)
    moved = runs.shape
    runs = runs.reshape(*moved[:-1], moved[-1] // n, n)
    signed = jnp.asarray(matrix) if signs is None else matrix * signs[None]
    y = jnp.einsum("...j,ij->...i", runs, signed, precision=lax.Precision.HIGHEST)
    y = y.reshape(moved).swapaxes(axis, -1)
    assert y.shape == shape
    return lax.optimization_barrier(y)  # as in `rotate`: computed once


def permutation(key: jax.Array, n: int) -> Int32[Array, " n"]:
    """Returns a random permutation of range(n), the same for both operands of a GEMM."""
    return jnp.argsort(jax.random.bits(key, (n,), jnp.uint32))
