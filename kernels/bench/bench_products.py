"""Time and error of a float32 product by float16 halves, beside float32's own and bfloat16's.

    python -m mxjax.kernels.bench.bench_products [--shapes 32768x512x2752 …] [--out FILE]

A shape is m x k x n: x [m, k] @ w [k, n], as in a layer's Fprop. Its Dgrad and Wgrad are measured too, which
contract n and m. The error is that of 64 rows against float64, in the Frobenius norm. Long sums of matrix
units are less exact than float32's, also those of bfloat16. Prints a table for each shape, and JSON as the
last line.
"""

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mxjax.kernels.bench.report import Report, add_arguments
from mxjax.kernels.bench.timing import measure
from mxjax.product import contract, contract_by_halves
from mxjax.tables import table

SHAPES = ("32768x512x2752",)
ROWS = 64
GEMMS = {"fprop": (-1, -2), "dgrad": (-1, -1), "wgrad": (-2, -2)}
"""The axes that each GEMM contracts."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the shapes that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m mxjax.kernels.bench.bench_products", description=__doc__)
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=list(map(shape_of, SHAPES)))
    add_arguments(parser)
    options = parser.parse_args(arguments)
    report = Report("mxjax.kernels.bench.bench_products", arguments, options)
    for shape in options.shapes:
        bench_shape(report, shape)
    report.print()


def shape_of(text: str) -> tuple[int, int, int]:
    """Reads MxKxN."""
    m, k, n = map(int, text.split("x"))
    if min(m, k, n) < ROWS:
        raise argparse.ArgumentTypeError(f"{text}: sizes must be at least {ROWS}")
    return m, k, n


def bench_shape(report: Report, shape: tuple[int, int, int]) -> None:
    """Measures the GEMMs of one shape and prints their table."""
    x, w, dy = draw(shape)
    tensors = {"fprop": (x, w), "dgrad": (dy, w), "wgrad": (x, dy)}
    rows = []
    for gemm, axes in GEMMS.items():
        lhs, rhs = tensors[gemm]
        wanted = exact_rows(lhs, rhs, axes)
        for name, way in ways().items():
            if report.is_late:
                continue
            product = jax.jit(lambda a, b, way=way, axes=axes: way(a, axes[0], b, axes[1]))
            error = relative_error(product(lhs, rhs)[:ROWS], wanted)
            timing = measure(product, lhs, rhs, rounds=report.rounds)
            report.add(timing, shape=shape, gemm=gemm, name=name, error=error, **timing._asdict())
            rows.append([f"{gemm}, {name}", f"{1e6 * timing.median:.0f}", f"{error:.1e}"])
    print(f"\n{' x '.join(map(str, shape))}\n")
    print(table(" | us | error", rows, padded=True), flush=True)


def draw(shape: tuple[int, int, int]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns x [m, k] with a scale for each row, w [k, n] and dy [m, n], in float32."""
    m, k, n = shape
    keys = jax.random.split(jax.random.key(0), 4)
    x, w, dy = (jax.random.normal(key, s) for key, s in zip(keys, ((m, k), (k, n), (m, n)), strict=False))
    return x * jnp.exp(jax.random.normal(keys[3], (m, 1))), w, dy


def ways() -> Mapping[str, Callable[..., jax.Array]]:
    """Returns the ways to contract two axes of float32 operands."""

    def bfloat16(lhs, lhs_axis, rhs, rhs_axis):
        lhs, rhs = lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16)
        return contract(lhs, lhs_axis, rhs, rhs_axis, lax.Precision.DEFAULT)

    float32 = functools.partial(contract, precision=lax.Precision.HIGHEST)
    return {"float32": float32, "halves": contract_by_halves, "bfloat16": bfloat16}


def exact_rows(lhs: jax.Array, rhs: jax.Array, axes: tuple[int, int]) -> np.ndarray:
    """Returns the first rows of the product in float64."""
    left = lhs[:ROWS] if axes[0] == -1 else lhs[:, :ROWS].T
    right = rhs if axes[1] == -2 else rhs.T
    return np.asarray(left, np.float64) @ np.asarray(right, np.float64)


def relative_error(got: jax.Array, wanted: np.ndarray) -> float:
    """Returns |got - wanted| / |wanted| in the Frobenius norm."""
    return float(np.linalg.norm(np.asarray(got, np.float64) - wanted) / np.linalg.norm(wanted))


if __name__ == "__main__":
    main()
