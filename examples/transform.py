"""Trains a Flax Linen transformer in MXFP4 without a change to the model: `mxjax.transform` of its loss.

    python examples/transform.py

prints the products that were found, and the loss at every tenth of 30 steps; it falls from 3.1 to 0.01. It
needs flax and optax, which the extra `train` installs, and no GPU.
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen

import mxjax

VOCABULARY, WIDTH, BATCH, LENGTH, STEPS = 16, 64, 16, 24, 30


class Transformer(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(VOCABULARY, WIDTH)(tokens)
        x += linen.MultiHeadDotProductAttention(4)(x, mask=linen.make_causal_mask(tokens))
        x += linen.Dense(WIDTH)(linen.gelu(linen.Dense(4 * WIDTH)(linen.LayerNorm()(x))))
        return linen.Dense(VOCABULARY, name="head")(linen.LayerNorm()(x))


def cross_entropy(params, tokens):
    logits = jnp.asarray(Transformer().apply(params, tokens[:, :-1]))
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


loss_in_mxfp4 = mxjax.transform(cross_entropy, "wgrad_hadamard", rules=[("*head*", "bf16")])
optimizer = optax.adamw(3e-3)


@jax.jit
def train_step(params, state, tokens):
    loss, grads = jax.value_and_grad(loss_in_mxfp4)(params, tokens)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def main(steps: int = STEPS) -> list[float]:
    """Returns the losses of all steps."""
    tokens = (jnp.arange(LENGTH) + 5 * jnp.arange(BATCH)[:, None]) % VOCABULARY
    params = Transformer().init(jax.random.key(0), tokens)
    print(loss_in_mxfp4.report(params, tokens))
    state, losses = optimizer.init(params), []
    for step in range(1, steps + 1):
        params, state, loss = train_step(params, state, tokens)
        losses.append(float(loss))
        if step == 1 or step % 10 == 0:
            print(f"step {step:2}  loss {loss:.3f}")
    return losses


if __name__ == "__main__":
    losses = main()
