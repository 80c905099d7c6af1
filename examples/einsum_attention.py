"""Trains an attention layer whose projections are einsums in MXFP4, and whose own products are not quantized.

    python examples/einsum_attention.py

prints the loss at every tenth of 30 steps: the layer learns to copy the token before. It falls from 1.2 to
0.5. No GPU is needed.
"""

import jax
import jax.numpy as jnp

import mxjax

POLICY = "wgrad_hadamard"
BATCH, TIME, WIDTH, HEADS, HEAD, RATE = 8, 32, 64, 4, 16, 10.0


def attention(params, x):
    q, k, v = (mxjax.einsum("btd,dhk->bhtk", x, params[name], policy=POLICY) for name in "qkv")
    scores = jnp.einsum("bhtk,bhsk->bhts", q, k) / HEAD**0.5 + params["distance"]
    mask = jnp.tril(jnp.ones((TIME, TIME), bool))
    mixed = jnp.einsum("bhts,bhsk->bhtk", jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)), v)
    return mxjax.einsum("bhtk,hkd->btd", mixed, params["out"], policy=POLICY)


@jax.jit
def train_step(params, x, y):
    loss, grads = jax.value_and_grad(lambda params: jnp.mean((attention(params, x) - y) ** 2))(params)
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads), loss


def main(steps: int = 30) -> list[float]:
    """Returns the losses of all steps."""
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(keys[0], (BATCH, TIME, WIDTH))
    params = {
        name: jax.random.normal(key, (WIDTH, HEADS, HEAD)) / WIDTH**0.5
        for name, key in zip("qkv", keys[1:], strict=False)
    }
    params["out"] = jax.random.normal(keys[4], (HEADS, HEAD, WIDTH)) / WIDTH**0.5
    params["distance"] = jnp.zeros((TIME, TIME))
    y = jnp.roll(x, 1, axis=1).at[:, 0].set(0)
    losses = []
    for step in range(1, steps + 1):
        params, loss = train_step(params, x, y)
        losses.append(float(loss))
        if step == 1 or step % 10 == 0:
            print(f"step {step:2}  loss {loss:.3f}")
    return losses


if __name__ == "__main__":
    losses = main()
