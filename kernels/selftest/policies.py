"""`mxjax.dot` and its gradients under every policy: the fastest implementation here against `xla`.

Both multiply the same quantized values, so they differ by the order of float32 sums alone.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mxjax.kernels.selftest.cases import Case, Settings, abstract, lower_program
from mxjax.products.dot import dot
from mxjax.products.implementations import Implementation, choose_implementation, implementations_of
from mxjax.recipes import get_policy, policies
from mxjax.runtime.devices import INTERPRETER, current_target

TOLERANCE = 2e-3
"""Norm of the difference over the norm. A kernel that reads one wrong block is further off."""
QUICK = ("bf16", "wgrad_hadamard", "wgrad_sr")
SHAPES = ((2, 100, 160), (160, 232))  # no multiples of tiles
SMALL = ((2, 20, 32), (32, 40))


def cases(settings: Settings) -> list[Case]:
    """Returns a case for each policy."""
    return [
        Case(name, functools.partial(compare, name, settings), functools.partial(lower, name, settings))
        for name in (QUICK if settings.quick else policies())
    ]


def compare(policy: str, settings: Settings) -> Mapping[str, Any]:
    """Compares y, dx and dw.

    Raises:
      AssertionError: one of them is further off than TOLERANCE.
    """
    arrays = _arrays(settings)
    how = implementation_for(policy)
    got, wanted = (_step(policy, name)(*arrays) for name in (how, "xla"))
    distances = {}
    for name, a, b in zip(("y", "dx", "dw"), got, wanted, strict=True):
        error = jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel())
        distances[name] = float(error)
        assert distances[name] <= TOLERANCE, f"{name} differs from xla's by {distances[name]:.2g}"
    return {"implementation": how or choose_implementation(None), "differs": distances}


def lower(policy: str, settings: Settings) -> None:
    """Compiles the kernels of both implementations."""
    for name in (implementation_for(policy), "xla"):
        lower_program(_step(policy, name), *abstract(*_arrays(settings)))


def implementation_for(policy: str) -> Implementation | None:
    """Returns None for the fastest; in the interpreter "triton", where it takes the policy."""
    if current_target() != INTERPRETER:
        return None
    try:
        implementations_of(get_policy(policy), "triton")
    except NotImplementedError:
        return None
    return "triton"


@functools.cache
def _arrays(settings: Settings) -> list[jax.Array]:
    x_shape, w_shape = SMALL if settings.quick else SHAPES
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], x_shape, jnp.bfloat16)
    w = 0.02 * jax.random.normal(keys[1], w_shape, jnp.float32)
    return [x, w, 1e-4 * jax.random.normal(keys[2], (*x_shape[:-1], w_shape[1]), jnp.float32)]


@functools.cache
def _step(policy: str, implementation: Implementation | None) -> Any:
    def step(x, w, dy):
        product = functools.partial(dot, policy=policy, key=jax.random.key(1), implementation=implementation)
        y, vjp = jax.vjp(product, x, w)
        dx, dw = vjp(dy)
        return y, dx.astype(jnp.float32), dw

    return jax.jit(step)
