"""The order of the backward pass on a mesh, which decides what hides the sums of gradients over devices.

A scheduler sees that only the optimizer reads the gradients of weights. XLA's computes those of all blocks at
the end of the step, one product after another. There nothing hides their reduce-scatters: by a trace on two
H200 each starts when the next product frees multiprocessors, and the product after that waits for it.

Here the backward pass waits for them earlier. It leaves the MLP after the gradient of `down`, the attention
after that of `out`, and the block after those of `gate_up`, of `qkv` in the block above, and of the head two
blocks above: each time there is something else to compute in the meantime.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from models.sharding import batch_parts


def after_gradients[T](x: jax.Array, weights: T) -> tuple[jax.Array, T]:
    """Returns both. On a mesh the gradient of x is used only after those of the weights are summed."""
    return _tied(x, weights) if batch_parts() > 1 else (x, weights)


@jax.custom_vjp
def _tied(x, weights):
    return x, weights


_tied.defvjp(lambda x, weights: ((x, weights), None), lambda _, given: jax.lax.optimization_barrier(given))


def run_blocks(run: Callable[..., Any], x: jax.Array, layers: Any, n: int, head: jax.Array):
    """Returns x after `run(x, layer)` of each of n blocks, and the head: a loop, but unrolled.

    Args:
      run: one block; returns x and None, as the body of `jax.lax.scan` does.
      layers: ((parameters, other arrays of floats), other arrays), all stacked over blocks. Parameters are
        nested dicts.
      head: the weight that is read after these blocks.
    """
    floats, others = layers
    parts = _unstack(floats, n)
    blocks = [weights for weights, _ in parts]
    for i, block in enumerate(blocks):
        x, block["mlp"]["gate_up"] = after_gradients(x, block["mlp"]["gate_up"])
        if i + 1 < n:
            above = blocks[i + 1]["attention"]
            x, above["qkv"] = after_gradients(x, above["qkv"])
        if i == max(n - 2, 0):
            x, head = after_gradients(x, head)
        x, _ = run(x, ((block, parts[i][1]), jax.tree.map(lambda a, i=i: a[i], others)))
    return x, head


def _unstack(stacked: Any, n: int) -> list[Any]:
    """Returns the n parts of stacked arrays. Their gradients are stacked, not padded and added."""

    @jax.custom_vjp
    def parts(stacked):
        return [jax.tree.map(lambda a, i=i: a[i], stacked) for i in range(n)]

    def stack(_, given):
        return (jax.tree.map(lambda *leaves: jnp.stack(leaves), *given),)

    parts.defvjp(lambda stacked: (parts(stacked), None), stack)
    return parts(stacked)
