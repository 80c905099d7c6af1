"""Time of `mxjax.dot` forward and backward at Llama 3.1 8B's shapes, beside `jnp.dot` in bfloat16.

    python -m mxjax.kernels.bench_dot [--tokens 8192 16384] [--linears mlp.down …] [--policies …] [--out FILE]

Each line is first compared with the reference. The time of the operands alone (rotate, quantize, encode) is
measured apart; the rest of a line's time is its three GEMMs. Prints a table a shape, and as its last line
JSON.
"""

import argparse
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mxjax.dot import dot
from mxjax.gemm import Implementation, plan, prepare
from mxjax.kernels.shapes import LINEARS, TOKENS
from mxjax.kernels.timing import Timing, measure, print_json, print_table
from mxjax.operands import fold, uses_of
from mxjax.recipes import get_policy

POLICIES = ("bf16", "fp8", "wgrad", "wgrad_hadamard", "full_hadamard", "wgrad_sr")
TOLERANCE = 5e-3  # bfloat16 results


class Line(NamedTuple):
    """One line of the table: a forward and backward pass, and its quantization alone, if it has any."""

    name: str
    run: Callable
    operands: Callable | None = None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m mxjax.kernels.bench_dot", description=__doc__)
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--linears", nargs="+", default=list(LINEARS), help=", ".join(LINEARS))
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--implementations", nargs="+", default=["xla", "fp8"])
    parser.add_argument("--out", type=Path, help="file for the JSON")
    options = parser.parse_args(arguments)
    records = []
    for tokens in options.tokens:
        for name in options.linears:
            d_in, d_out = LINEARS[name]
            tensors = make_tensors(tokens, d_in, d_out)
            print(f"\n{name}: {tokens} x {d_in} -> {d_out}\n")
            lines = list(lines_of(options.policies, options.implementations))
            results = [time_line(line, tensors) for line in lines]
            base = results[0][0].median
            print_table(
                ["", "ms", "p10", "p90", "of jnp.dot", "operands", "GEMMs"],
                [row(line, *result, base) for line, result in zip(lines, results, strict=True)],
            )
            shape = {"tokens": tokens, "linear": name, "d_in": d_in, "d_out": d_out}
            for line, (whole, operands) in zip(lines, results, strict=True):
                parts = {"operands": operands and operands._asdict(), "of_jnp_dot": whole.median / base}
                records.append(shape | {"name": line.name, **whole._asdict(), **parts})
    print()
    print_json({"records": records})
    if options.out:
        options.out.write_text(json.dumps(records, indent=1) + "\n")


def make_tensors(tokens: int, d_in: int, d_out: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns x, w and dy as in training: bfloat16 activations and gradients, float32 weights."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (tokens, d_in), jnp.bfloat16)
    w = 0.02 * jax.random.normal(keys[1], (d_in, d_out), jnp.float32)
    return x, w, 1e-4 * jax.random.normal(keys[2], (tokens, d_out), jnp.bfloat16)


def lines_of(policies: Sequence[str], implementations: Sequence[Implementation]) -> Iterator[Line]:
    """Yields the baseline first, then every policy by every implementation that differs for it."""
    yield Line("jnp.dot, bfloat16", jax.jit(functools.partial(both_ways, in_bfloat16)))
    for name in policies:
        for implementation in implementations if name != "bf16" else implementations[:1]:
            product = functools.partial(
                dot,
                policy=name,
                key=jax.random.key(1),
                implementation=implementation,
                preferred_element_type=jnp.bfloat16,
            )
            operands = None
            if name != "bf16":
                operands = jax.jit(functools.partial(make_operands, name, implementation))
            yield Line(f"{name}, {implementation}", jax.jit(functools.partial(both_ways, product)), operands)


def in_bfloat16(x, w):
    """The baseline's product."""
    return jnp.dot(x, w.astype(jnp.bfloat16))


def both_ways(product, x, w, dy):
    """Returns y, dx and dw."""
    y, vjp = jax.vjp(product, x, w)
    return y, *vjp(dy)


def make_operands(name: str, implementation: Implementation, x, w, dy):
    """Returns the six operands of a policy's GEMMs, each tensor's two in one go."""
    policy, key = get_policy(name), jax.random.key(1)
    hows = plan(policy, implementation)
    x_use, w_use = uses_of(policy.fprop, -1, -2, fold(key, 0))
    dgrad, wgrad = uses_of(policy.dgrad, -1, -1, fold(key, 1)), uses_of(policy.wgrad, -2, -2, fold(key, 2))
    return [
        prepare(x, ((hows.fprop, x_use), (hows.wgrad, wgrad[0]))),
        prepare(w, ((hows.fprop, w_use), (hows.dgrad, dgrad[1]))),
        prepare(dy, ((hows.dgrad, dgrad[0]), (hows.wgrad, wgrad[1]))),
    ]


def time_line(line: Line, tensors) -> tuple[Timing, Timing | None]:
    """Returns the times of a line, and of its operands alone, once its results are checked."""
    check(line, tensors)
    return measure(line.run, *tensors), line.operands and measure(line.operands, *tensors)


def check(line: Line, tensors) -> None:
    """Raises AssertionError unless the results, on a part of the tensors, are the reference's."""
    if "," not in line.name or line.name.startswith("jnp"):
        return
    name, _ = line.name.split(", ")
    x, w, dy = tensors
    part = x[:512, :1024], w[:1024, :768], dy[:512, :768]
    reference = functools.partial(
        dot,
        policy=name,
        key=jax.random.key(1),
        implementation="reference",
        preferred_element_type=jnp.bfloat16,
    )
    wanted = jax.jit(functools.partial(both_ways, reference))(*part)
    for got, expected in zip(line.run(*part), wanted, strict=True):
        got, expected = (t.astype(jnp.float32) for t in (got, expected))
        assert jnp.linalg.norm(got - expected) < TOLERANCE * jnp.linalg.norm(expected), line.name


def row(line: Line, whole: Timing, operands: Timing | None, base: float) -> list[str]:
    parts = ["", ""] if operands is None else [f"{1e3 * operands.median:.2f}"]
    parts += [f"{1e3 * (whole.median - operands.median):.2f}"] if operands else []
    return [line.name, *(f"{1e3 * t:.2f}" for t in whole), f"{whole.median / base:.2f}", *parts]


if __name__ == "__main__":
    main()
