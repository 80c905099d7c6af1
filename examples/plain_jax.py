"""Trains a two-layer MLP with every GEMM in MXFP4: plain JAX and `mxjax.dot`.

    python examples/plain_jax.py

prints the loss at every tenth of 30 steps; it falls from 1.5 to 0.6. No GPU is needed.
"""

import jax
import jax.numpy as jnp

import mxjax

POLICY = "wgrad_hadamard"
WIDTH, BATCH, RATE = 64, 256, 0.2


def mlp(params, x):
    hidden = jax.nn.relu(mxjax.dot(x, params["up"], policy=POLICY))
    return mxjax.dot(hidden, params["down"], policy=POLICY)


def mean_squared_error(params, x, y):
    return jnp.mean((mlp(params, x) - y) ** 2)


@jax.jit
def train_step(params, x, y):
    loss, grads = jax.value_and_grad(mean_squared_error)(params, x, y)
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads), loss


def main(steps: int = 30) -> list[float]:
    """Returns the losses of all steps."""
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (BATCH, WIDTH))
    y = x @ jax.random.normal(keys[1], (WIDTH, WIDTH)) / WIDTH**0.5
    params = {  # float32 master weights: `dot` quantizes them at every use
        "up": jax.random.normal(keys[2], (WIDTH, 4 * WIDTH)) * (2 / WIDTH) ** 0.5,
        "down": jax.random.normal(keys[3], (4 * WIDTH, WIDTH)) * (0.1 / WIDTH) ** 0.5,
    }
    losses = []
    for step in range(1, steps + 1):
        params, loss = train_step(params, x, y)
        losses.append(float(loss))
        if step == 1 or step % 10 == 0:
            print(f"step {step:2}  loss {loss:.3f}")
    return losses


if __name__ == "__main__":
    losses = main()
