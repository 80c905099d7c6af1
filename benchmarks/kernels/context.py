"""Time of attention over the devices of a sequence: the ring that trains, and an all-to-all.

    python -m benchmarks.kernels.context [--shapes 1x32768x32x8x64 …] [--out FILE]

Shapes as in `benchmarks.kernels.attention`, of one sequence, in as many rows as there are devices; forward,
and forward and backward. "ring" is `models.attention.ring`. "all-to-all" gives each device a share of the
heads of whole sequences (arXiv 2309.14509). "one device" is the whole sequence's attention. Each result is
compared with that one's; "error" is the largest norm of a difference over the result's. The rate counts 2
products forward, 5 backward, masked or not, of all devices.
"""

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels import attention
from benchmarks.kernels.attention import Shape, parse_shape
from models.attention import ring
from models.attention.causal import causal_attention
from models.sharding import spec
from mxjax.kernels.selftest.measured import Case, Checked, Report, add_arguments, time_cases
from training.sharding import compiler_options, make_mesh

SHAPES = [Shape(1, length, 32, 8, 64) for length in (8192, 32_768, 131_072)]  # Llama 3.2 1B's heads
LARGEST_ERROR = 0.02
PASSES = {which: attention.PASSES[which] for which in ("forward", "forward and backward")}
ROWS = ("rows", None, None, None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the lengths that the command line names; exits with 1 if a result is wrong."""
    module = "benchmarks.kernels.context"
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=__doc__)
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=SHAPES, metavar="BxSxNxGxH")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    unit = 2 * jax.device_count()
    if any(shape.b != 1 or shape.s % unit for shape in options.shapes):
        parser.error(f"--shapes needs one sequence, of a multiple of {unit} tokens on {unit // 2} devices")
    report = Report(module, arguments, options)
    report.content["devices"] = jax.device_count()
    for shape in options.shapes:
        title = f"{shape.s} tokens, {shape.n} heads of {shape.h}, {shape.g} of keys, {unit // 2} devices"
        time_cases(report, title, "FLOP", cases(shape))
    report.print()


def cases(shape: Shape) -> Iterator[Case]:
    """Yields each way to share a sequence, on the devices that there are."""
    parts = jax.device_count()
    ways: dict[str, Callable[..., jax.Array]] = {
        "one device": causal_attention,
        "ring": lambda q, k, v: ring.ring_attention(q, k, v, None, None, parts),
    }
    if shape.g % parts == 0:
        ways["all-to-all"] = by_heads
    for which, products in PASSES.items():
        for name, attend in ways.items():
            check = functools.partial(_check, shape, which, name, attend)
            fields = {"shape": "x".join(map(str, shape)), "which": which, "by": name}
            work = products * shape.n * shape.h * float(shape.s) ** 2
            yield Case(f"{which}, {name}", check, work, name == "ring", name == "one device", fields)


def _check(shape: Shape, which: str, name: str, attend: Callable[..., jax.Array]) -> Checked:
    tensors, wanted = _tensors(shape)
    one = name == "one device"
    mesh = make_mesh(None if one else f"context={jax.device_count()}", jax.devices()[:1] if one else None)
    sharding = jax.NamedSharding(mesh, spec(ROWS))

    def run(q, k, v, dout):
        if which == "forward":
            return [attend(q, k, v)]
        out, vjp = jax.vjp(attend, q, k, v)
        return [out, *vjp(dout)]

    rows = 1 if one else jax.device_count()
    given = [jax.device_put(x.reshape(rows, -1, *x.shape[2:]), sharding) for x in tensors]
    compiled = jax.jit(run, compiler_options=compiler_options(mesh, (), None))

    def call():
        with jax.set_mesh(mesh):
            return compiled(*given)

    errors = [_distance(x, y) for x, y in zip(jax.device_get(call()), wanted, strict=False)]
    assert max(errors) < LARGEST_ERROR, f"differs from one device's by {max(errors):.2g}"
    return Checked(call, max(errors))


@functools.lru_cache(1)
def _tensors(shape: Shape) -> tuple[list[jax.Array], list[Any]]:
    """Returns q, k, v and dout on one device, and the result and gradients of its attention."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, dout = (
        jax.random.normal(key, (1, shape.s, heads, shape.h), jnp.bfloat16)
        for key, heads in zip(keys, (shape.n, shape.g, shape.g, shape.n), strict=True)
    )
    with jax.set_mesh(make_mesh(None, jax.devices()[:1])):
        out, vjp = jax.vjp(jax.jit(causal_attention), q, k, v)
        return [q, k, v, dout], jax.device_get([out, *vjp(dout)])


def _distance(got: Any, wanted: Any) -> float:
    got, wanted = (jnp.asarray(x, jnp.float32) for x in (got, wanted))
    return float(jnp.linalg.norm(got.reshape(wanted.shape) - wanted) / jnp.linalg.norm(wanted))


def by_heads(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Returns attention, for which each device has a share of the heads of whole sequences."""

    def share(x, split: int, concatenated: int):
        return jax.lax.all_to_all(x, "context", split, concatenated, tiled=True)

    def of_device(q, k, v):
        q, k, v = (share(x, 2, 1) for x in (q, k, v))
        return share(causal_attention(q, k, v), 1, 2)

    rows = spec(ROWS)
    return jax.shard_map(of_device, in_specs=(rows, rows, rows), out_specs=rows, check_vma=False)(q, k, v)


if __name__ == "__main__":
    main()
