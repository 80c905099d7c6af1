"""Time of `mxjax.dot` forward and backward at Llama 3.1 8B's shapes, beside `jnp.dot` in bfloat16 and others.

    python -m benchmarks.kernels.dot [--tokens 8192] [--linears mlp.down …] [--policies …] [--out FILE]

Before our cases are timed, they are compared with the reference on a part of the tensors. All results are
compared with the baseline, `jnp.dot` in bfloat16, which is also the ceiling: "error" is the largest relative
distance of y, dx and dw. A case of another library that cannot run here is listed with the reason. Prints one
table a shape, and JSON as the last line. XLA tunes its GEMMs for each new shape, which takes most of the
time: choose few shapes a run, and give all runs one `--cache`.
"""

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import mxjax
from benchmarks.kernels.peers import linears
from mxjax.kernels.cases.shapes import LINEARS, TOKENS
from mxjax.kernels.selftest.measured import Case, Checked, Report, add_arguments, time_cases
from mxjax.products.implementations import Implementation

POLICIES = ("bf16", "fp8", "wgrad", "wgrad_hadamard", "full_hadamard", "wgrad_sr")
BASELINE = "jnp.dot, bfloat16"
TOLERANCE = 5e-3  # against the reference, of bfloat16 results
LARGEST_DIFFERENCE = 0.5  # against the baseline: all quantization errs by less, wrong results by more

Tensors = tuple[jax.Array, jax.Array, jax.Array]  # x, w, dy


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the cases that the command line names; exits with 1 if one of ours failed."""
    module = "benchmarks.kernels.dot"
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=__doc__)
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    names = list(LINEARS)
    parser.add_argument("--linears", nargs="+", default=names, choices=names, help=", ".join(names))
    parser.add_argument("--policies", nargs="*", default=list(POLICIES))
    parser.add_argument("--implementations", nargs="+", default=["xla", "fp8_carriers"])
    parser.add_argument("--peers", nargs="*", default=[""], help="parts of names of other libraries' cases")
    parser.add_argument("--cache", type=Path, help="folder of JAX's compilation cache")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    if options.cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(options.cache.absolute()))
    report = Report(module, arguments, options)
    for tokens in options.tokens:
        for linear in options.linears:
            title = f"{linear}: {tokens} x {LINEARS[linear][0]} -> {LINEARS[linear][1]}"
            time_cases(report, title, "FLOP", cases(tokens, linear, options))
    report.print()


def cases(tokens: int, linear: str, options: argparse.Namespace) -> Iterator[Case]:
    """Yields the baseline, the policies by each implementation, and other libraries' linear layers."""
    d_in, d_out = LINEARS[linear]
    tensors = make_tensors(tokens, d_in, d_out)
    baseline = jax.jit(functools.partial(both_ways, in_bfloat16))
    wanted = baseline(*tensors)
    work = 6.0 * tokens * d_in * d_out
    fields = {"tokens": tokens, "linear": linear, "d_in": d_in, "d_out": d_out}

    case = functools.partial(step_case, tensors, wanted, work, fields)
    yield case(BASELINE, baseline, is_ceiling=True)
    for policy in options.policies:
        # bf16 has one implementation.
        for by in options.implementations if policy != "bf16" else options.implementations[:1]:
            step = step_of(policy, by)
            compare = functools.partial(compare_part, step, reference(policy), tensors)
            yield case(f"{policy}, {by}", step, compare)
    for name, product in linears().items():
        if any(part in name for part in options.peers):
            yield case(name, jax.jit(functools.partial(both_ways, product)), ours=False)


def step_case(
    tensors: Tensors,
    wanted: Sequence[jax.Array],
    work: float,
    fields: Mapping[str, Any],
    name: str,
    step: Callable,
    compare: Callable[[], None] | None = None,
    **more: bool,
) -> Case:
    """Returns the case of a step that `compare` checks first, and whose results lie near the wanted ones."""

    def check() -> Checked:
        if compare is not None:
            compare()
        return Checked(functools.partial(step, *tensors), largest_distance(step(*tensors), wanted))

    return Case(name, check, work, fields=fields, **more)


def make_tensors(tokens: int, d_in: int, d_out: int, *experts: int) -> Tensors:
    """Returns x, w and dy as in training: bfloat16 activations and gradients, float32 weights."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (tokens, d_in), jnp.bfloat16)
    w = 0.02 * jax.random.normal(keys[1], (*experts, d_in, d_out), jnp.float32)
    return x, w, 1e-4 * jax.random.normal(keys[2], (tokens, d_out), jnp.bfloat16)


def both_ways(product: Callable, x, w, dy):
    """Returns y, dx and dw."""
    y, vjp = jax.vjp(product, x, w)
    return y, *vjp(dy)


def in_bfloat16(x, w):
    """Returns the baseline's product."""
    return jnp.dot(x, w.astype(jnp.bfloat16))


def step_of(policy: str, implementation: Implementation) -> Callable:
    """Returns the jitted forward and backward pass of `dot`."""
    options = {"key": jax.random.key(1), "preferred_element_type": jnp.bfloat16}
    product = functools.partial(mxjax.dot, policy=policy, implementation=implementation, **options)
    return jax.jit(functools.partial(both_ways, product))


@functools.cache
def reference(policy: str) -> Callable:
    """Returns the step by the definitions."""
    return step_of(policy, "reference")


def compare_part(step: Callable, wanted: Callable, tensors: Tensors) -> None:
    """Raises AssertionError unless a step agrees with the wanted one on a part of the tensors."""
    x, w, dy = tensors
    part = x[:512, :1024], w[..., :1024, :768], dy[:512, :768]
    for got, expected in zip(step(*part), wanted(*part), strict=True):
        assert distance(got, expected) < TOLERANCE, "it differs from the reference"


def largest_distance(results: Sequence[jax.Array], wanted: Sequence[jax.Array]) -> float:
    """Returns the largest distance of y, dx and dw; raises AssertionError if it is no quantization error."""
    found = max(float(distance(*pair)) for pair in zip(results, wanted, strict=True))
    assert found < LARGEST_DIFFERENCE, f"wrong: differs from the baseline by {found}"
    return found


@jax.jit
def distance(got: jax.Array, wanted: jax.Array) -> jax.Array:
    """Returns the norm of the difference over the norm of the wanted array."""
    got, wanted = got.astype(jnp.float32), wanted.astype(jnp.float32)
    return jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted)


if __name__ == "__main__":
    main()
