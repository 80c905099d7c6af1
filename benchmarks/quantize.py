"""Speed of `mxjax.quantize` beside ml_dtypes' cast and gfloat, on JAX's default device.

    python -m benchmarks.quantize [--rows 4096] [--columns 1024] [--repeats 9]

Compares the results first, then prints a table (GB/s of float32 read), and JSON last.
"""

import argparse
import functools
import json
import statistics
import time

import gfloat
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from gfloat import formats

import mxjax
from mxjax.formats import BLOCK
from mxjax.quantize import block_values, quantize_unpacked
from mxjax.rounding import Rounding
from mxjax.tables import table


def cast(x: np.ndarray) -> np.ndarray:
    """Casts without scales: a bound for implementations of MXFP4 in numpy."""
    return x.astype(ml_dtypes.float4_e2m1fn)


def gfloat_blocks(x: np.ndarray) -> np.ndarray:
    """Returns gfloat's dequantized MXFP4, block by block in numpy, with the OCP specification's scale."""
    info = formats.format_info_mxfp4_e2m1
    rows = [gfloat.quantize_block(info, block, gfloat.compute_scale_amax) for block in x.reshape(-1, BLOCK)]
    return np.stack(rows).reshape(x.shape)


@functools.partial(jax.jit, static_argnums=(1, 2))
def fake_quantize(x: jax.Array, rounding: Rounding = "nearest", rotated: bool = False) -> jax.Array:
    """Returns the bfloat16 values that the `xla` implementation of `dot` multiplies."""
    key = jax.random.key(0) if rounding == "stochastic" else None
    x = mxjax.rotate(x) if rotated else x
    operand = mxjax.Operand(rounding=rounding)
    return block_values(quantize_unpacked(x, operand, -1, key)).astype(jnp.bfloat16)


def seconds(f, *args, repeats: int) -> list[float]:
    """Times calls after the first, which compiles; returns sorted seconds."""
    jax.block_until_ready(f(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        times.append(time.perf_counter() - start)
    return sorted(times)


def main() -> None:
    """Checks, times and prints."""
    parser = argparse.ArgumentParser(description="Speed of mxjax.quantize beside ml_dtypes and gfloat.")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    x = jax.random.normal(jax.random.key(0), (arguments.rows, arguments.columns))
    host = np.asarray(x)
    few = host[: max(1, 2**16 // arguments.columns)]  # gfloat is slow

    np.testing.assert_array_equal(mxjax.dequantize(mxjax.quantize(few)), gfloat_blocks(few))
    np.testing.assert_array_equal(np.asarray(fake_quantize(few), np.float32), gfloat_blocks(few))

    cases = {
        "mxjax.quantize (float4 + scales)": (mxjax.quantize, x),
        "fake quantization (bfloat16 out)": (fake_quantize, x),
        "fake quantization, stochastic": (lambda a: fake_quantize(a, "stochastic"), x),
        "fake quantization after H16": (lambda a: fake_quantize(a, "nearest", True), x),
        "ml_dtypes cast (no scales)": (cast, host),
        "gfloat.quantize_block": (gfloat_blocks, few),
    }
    results, rows = {}, []
    for name, (f, a) in cases.items():
        times = seconds(f, a, repeats=arguments.repeats)
        slowest, median, fastest = (
            a.size * 4e-9 / t for t in (times[-1], statistics.median(times), times[0])
        )
        results[name] = {"slowest": slowest, "median": median, "fastest": fastest}
        rows.append([name, *(f"{rate:.4f}" for rate in (median, slowest, fastest))])
    print(table("GB/s | median | slowest | fastest", rows, padded=True))
    print(json.dumps({"device": jax.devices()[0].device_kind, "shape": x.shape, "gb_per_s": results}))


if __name__ == "__main__":
    main()
