"""The programs that `bench_export` carries: dots, training steps and attention, as functions of arrays."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp

from mxjax.devices import current_target
from mxjax.implementations import Implementation
from mxjax.kernels.bench.dot_cases import make_step, make_tensors
from mxjax.kernels.selftest import training
from mxjax.kernels.shapes import LINEARS

SIZES = [8192, *LINEARS["mlp.down"]]
"""Tokens, inputs and outputs of the dots."""
PROGRAMS = (
    "wgrad_hadamard",
    "amazon",
    "full_rht",
    "tetrajet",
    "wgrad_hadamard:triton",
    "wgrad_hadamard:xla",
    "step:wgrad_hadamard",
    "step:wgrad_sr",
    "attention",
)
"""With them every kernel runs on CUDA: quantizers, draws, carriers, the MXFP4 GEMM, and attention."""
_ATTENTION = {"q": (2, 1024, 8, 128), "k": (2, 1024, 2, 128), "v": (2, 1024, 2, 128)}

Arrays = tuple[jax.Array, ...]


class Program(NamedTuple):
    """A program of arrays.

    Attributes:
      run: takes the inputs and returns the results.
      inputs: returns the inputs.
      results: names of the results.
    """

    run: Callable[..., Arrays]
    inputs: Callable[[], Arrays]
    results: tuple[str, ...]


def program_of(name: str, sizes: Sequence[int]) -> Program:
    """Returns the program of a name: POLICY, POLICY:IMPLEMENTATION, step:POLICY or attention."""
    first, _, second = name.partition(":")
    if name == "attention":
        return Program(_attend_both_ways, _attention_inputs, ("o", "dq", "dk", "dv"))
    if first == "step":
        return _training_step(second)
    how = cast(Implementation | None, second or (None if current_target() else "xla"))
    return Program(make_step(first, how), functools.partial(make_tensors, *sizes), ("y", "dx", "dw"))


def _training_step(policy: str) -> Program:
    """Returns the self-test's step of momentum, of flat parameters and velocities."""
    params = jax.eval_shape(training.init)
    leaves, tree = jax.tree.flatten(params)
    names = ["/".join(str(key.key) for key in path) for path, _ in jax.tree.leaves_with_path(params)]

    def run(*arrays: jax.Array) -> Arrays:
        state = (jax.tree.unflatten(tree, part) for part in (arrays[: len(leaves)], arrays[len(leaves) : -3]))
        return tuple(jax.tree.leaves(training.step(policy, *state, *arrays[-3:])))

    def inputs() -> Arrays:
        params = jax.tree.leaves(training.init())
        return *params, *map(jnp.zeros_like, params), *training.batch_of(0), jnp.int32(1)

    return Program(run, inputs, (*names, *(f"velocity of {name}" for name in names), "loss"))


def _attend_both_ways(q: jax.Array, k: jax.Array, v: jax.Array, dy: jax.Array) -> Arrays:
    from mxjax.kernels.attention.fused import fused_attention  # needs Triton

    y, vjp = jax.vjp(fused_attention, q, k, v)
    return y, *vjp(dy)


def _attention_inputs() -> Arrays:
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (*_ATTENTION.values(), _ATTENTION["q"])
    return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))
