"""Trains `flax.nnx.Linear` layers in MXFP4: pass mxjax's `dot_general`, keep the rest of the program.

    python examples/flax_nnx.py

prints the loss at every tenth of 30 steps; it falls from 1.5 to 0.14. It needs flax and optax, which the
extra `train` installs, and no GPU.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import mxjax

WIDTH, BATCH = 64, 256


class MLP(nnx.Module):
    def __init__(self, policy: str, rngs: nnx.Rngs):
        dot_general = mxjax.make_dot_general(policy)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, dot_general=dot_general, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, dot_general=dot_general, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


@nnx.jit
def train_step(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def main(steps: int = 30) -> list[float]:
    """Returns the losses of all steps."""
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (BATCH, WIDTH))
    y = x @ jax.random.normal(keys[1], (WIDTH, WIDTH)) / WIDTH**0.5
    model = MLP("wgrad_hadamard", nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    losses = []
    for step in range(1, steps + 1):
        loss = train_step(model, optimizer, x, y)
        losses.append(float(loss))
        if step == 1 or step % 10 == 0:
            print(f"step {step:2}  loss {loss:.3f}")
    return losses


if __name__ == "__main__":
    losses = main()
