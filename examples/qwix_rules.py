"""Trains a Flax model in MXFP4 without a change to it: qwix's rules give each layer's path a policy.

    python examples/qwix_rules.py

prints what runs in which policy, and the loss at every tenth of 30 steps; it falls from 1.9 to 0.26. It
needs the extras `train` and `integrations`, and no GPU.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import qwix
from flax import linen

from mxjax.integrations.qwix import PolicyRule, Provider

WIDTH, BATCH, TIME = 64, 8, 32


class Block(linen.Module):
    @linen.compact
    def __call__(self, x):
        x += linen.MultiHeadDotProductAttention(4, name="attention")(linen.LayerNorm()(x))
        hidden = linen.gelu(linen.Dense(4 * WIDTH, name="up")(linen.LayerNorm()(x)))
        return x + linen.Dense(WIDTH, name="down")(hidden)


RULES = [
    PolicyRule(module_path="down", policy="fp8"),  # the first rule that matches decides
    PolicyRule(module_path="up|attention/.*", policy="wgrad_hadamard"),
]
PROVIDER = Provider(RULES)
MODEL: Any = qwix.quantize_model(Block(), PROVIDER)


def main(steps: int = 30) -> list[float]:
    """Returns the losses of all steps."""
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (BATCH, TIME, WIDTH))
    y = jnp.cumsum(x, axis=1) / jnp.sqrt(jnp.arange(1, TIME + 1))[:, None]
    params, optimizer = MODEL.init(keys[1], x), optax.adamw(3e-3)
    state = optimizer.init(params)

    @jax.jit
    def train_step(params, state):
        loss, grads = jax.value_and_grad(lambda params: jnp.mean((MODEL.apply(params, x) - y) ** 2))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for step in range(1, steps + 1):
        params, state, loss = train_step(params, state)
        losses.append(float(loss))
        if step == 1:
            for product, policy in PROVIDER.products.items():
                print(f"{product:32} {policy}")
        if step == 1 or step % 10 == 0:
            print(f"step {step:2}  loss {loss:.3f}")
    return losses


if __name__ == "__main__":
    losses = main()
