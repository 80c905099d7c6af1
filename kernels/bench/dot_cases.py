"""The cases of `bench_dot`: forward and backward passes of one linear layer, and their operands alone."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mxjax.devices import current_target
from mxjax.dot import dot
from mxjax.formats import get_format
from mxjax.gemm_input import gemm_inputs
from mxjax.implementations import ON_PACKED, How, Implementation, implementations_of
from mxjax.kernels.bench.peers import linears
from mxjax.kernels.matmul.carry import carry_operand
from mxjax.keys import fold
from mxjax.kmajor import KMajor
from mxjax.prepare import Prepared, prepare
from mxjax.quantize import block_values
from mxjax.recipes import get_policy

POLICIES = ("bf16", "fp8", "wgrad", "wgrad_hadamard", "full_hadamard", "wgrad_sr")
BASELINE = "jnp.dot, bfloat16"
TOLERANCE = 5e-3  # against the reference, of bfloat16 results
LARGEST_DIFFERENCE = 0.5  # against the baseline: all quantization errs by less, wrong results by more

Tensors = tuple[jax.Array, jax.Array, jax.Array]  # x, w, dy


class Case(NamedTuple):
    """A linear layer to time.

    Attributes:
      run: takes x, w and dy and returns y, dx and dw.
      policy: policy of `dot`; None for the baseline and other libraries.
      parts: the work before the GEMMs, each from the start: "operands" makes what the GEMMs read, and
        "quantize" the packed operands, if the GEMMs read others.
    """

    name: str
    run: Callable
    policy: str | None = None
    parts: Mapping[str, Callable] = {}


def dot_cases(
    policies: Sequence[str], implementations: Sequence[Implementation], peers: Sequence[str]
) -> Iterator[Case]:
    """Yields the baseline, the policies by each implementation, and other libraries' linear layers.

    Args:
      peers: parts of the names of other libraries' cases.
    """
    yield Case(BASELINE, jax.jit(functools.partial(both_ways, in_bfloat16)))
    for name in policies:
        for how in implementations if name != "bf16" else implementations[:1]:
            yield Case(f"{name}, {how}", make_step(name, how), name, dict(parts_of(name, how)))
    for name, product in linears().items():
        if any(part in name for part in peers):
            yield Case(name, jax.jit(functools.partial(both_ways, product)))


def make_step(policy: str, implementation: Implementation) -> Callable:
    """Returns the jitted forward and backward pass of `dot`."""
    product = functools.partial(
        dot,
        policy=policy,
        key=jax.random.key(1),
        implementation=implementation,
        preferred_element_type=jnp.bfloat16,
    )
    return jax.jit(functools.partial(both_ways, product))


def in_bfloat16(x, w):
    """Returns the baseline's product."""
    return jnp.dot(x, w.astype(jnp.bfloat16))


def both_ways(product, x, w, dy):
    """Returns y, dx and dw."""
    y, vjp = jax.vjp(product, x, w)
    return y, *vjp(dy)


def make_tensors(tokens: int, d_in: int, d_out: int) -> Tensors:
    """Returns x, w and dy as in training: bfloat16 activations and gradients, float32 weights."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (tokens, d_in), jnp.bfloat16)
    w = 0.02 * jax.random.normal(keys[1], (d_in, d_out), jnp.float32)
    return x, w, 1e-4 * jax.random.normal(keys[2], (tokens, d_out), jnp.bfloat16)


def parts_of(name: str, implementation: Implementation) -> Iterator[tuple[str, Callable]]:
    """Yields the parts of a policy's step; none by FP8 carriers without kernels."""
    in_fp8 = "fp8_carriers" in implementations_of(get_policy(name), implementation)[:3]
    if name == "bf16" or (in_fp8 and current_target() is None):
        return
    if in_fp8:
        yield "quantize", jax.jit(functools.partial(make_operands, name, implementation, carried=False))
    yield "operands", jax.jit(functools.partial(make_operands, name, implementation))


def make_operands(name: str, implementation: Implementation, x, w, dy, carried: bool = True):
    """Returns the six operands of a policy's GEMMs, both of a tensor from one call.

    carried: encode them as the GEMMs read them.
    """
    policy, key = get_policy(name), jax.random.key(1)
    gemms = implementations_of(policy, implementation)
    x_use, w_use = gemm_inputs(policy.fprop, -1, -2, fold(key, 0))
    dgrad, wgrad = (
        gemm_inputs(policy.dgrad, -1, -1, fold(key, 1)),
        gemm_inputs(policy.wgrad, -2, -2, fold(key, 2)),
    )
    prepared = [
        (gemms.fprop, gemms.wgrad, prepare(x, ((gemms.fprop, x_use), (gemms.wgrad, wgrad[0]))), "e4m3"),
        (gemms.fprop, gemms.dgrad, prepare(w, ((gemms.fprop, w_use), (gemms.dgrad, dgrad[1]))), "e4m3"),
        (gemms.dgrad, gemms.wgrad, prepare(dy, ((gemms.dgrad, dgrad[0]), (gemms.wgrad, wgrad[1]))), "e5m2"),
    ]
    return [
        as_read(how, q, carrier) if carried else q
        for first, second, pair, carrier in prepared
        for how, q in zip((first, second), pair, strict=True)
    ]


def as_read(how: How, q: Prepared, carrier):
    """Returns the arrays that a GEMM multiplies, as `mxjax.gemm.multiply` makes them."""
    match q:
        case KMajor(scales=None):
            return q.elements
        case KMajor():
            if how != "fp8_carriers":
                return q
            return carry_operand(q.elements[None], q.scales[None], carrier, current_target())
        case _:
            assert how not in ON_PACKED
            if how != "fp8_tensor":
                return block_values(q).astype(jnp.bfloat16)
            elements = q.elements.astype(get_format(q.format).dtype)
            return elements if q.axis == -1 else elements.swapaxes(-1, -2)


def check(case: Case, tensors: Tensors) -> None:
    """Raises AssertionError unless the results on a part of the tensors are the reference's."""
    if case.policy is None:
        return
    x, w, dy = tensors
    part = x[:512, :1024], w[:1024, :768], dy[:512, :768]
    wanted = _reference(case.policy)(*part)
    for got, expected in zip(case.run(*part), wanted, strict=True):
        assert distance(got, expected) < TOLERANCE, f"{case.name} differs from the reference"


@functools.cache
def _reference(policy: str) -> Callable:
    return make_step(policy, "reference")


@jax.jit
def distance(got: jax.Array, wanted: jax.Array) -> jax.Array:
    """Returns the norm of the difference over the norm of the wanted array."""
    got, wanted = got.astype(jnp.float32), wanted.astype(jnp.float32)
    return jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted)
