"""Twenty steps of a Llama of `tiny`'s sizes in plain JAX, against the losses that a CPU computed.

It stands for `train.py --model tiny`, which the wheel does not hold: every linear layer of the blocks is
`mxjax.dot`; embedding, head, norms and attention stay in bfloat16 or float32. The data is a random walk over
bytes, so that nothing has to be downloaded. `losses.json` holds the CPU's losses;
`python -m mxjax.kernels.selftest.training` writes it.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.kernels.selftest.cases import Case, Settings, abstract, lower_program
from mxjax.products.dot import dot

LAYERS, WIDTH, HEADS, HIDDEN, VOCABULARY = 4, 128, 4, 384, 256
BATCH, LENGTH, STEPS = 8, 64, 20
RATE, MOMENTUM = 0.3, 0.9
POLICIES = ("bf16", "fp8", "wgrad", "wgrad_hadamard", "wgrad_sr", "full_rht")
QUICK = ("wgrad_hadamard",)
TOLERANCE = 0.02
"""Nats. Sums in other orders move values over rounding boundaries, and the steps carry the difference on."""
LOSSES = Path(__file__).with_name("losses.json")

Params = dict[str, Any]


def cases(settings: Settings) -> list[Case]:
    """Returns a case for each policy."""
    return [
        Case(name, functools.partial(compare, name), functools.partial(lower, name))
        for name in (QUICK if settings.quick else POLICIES)
    ]


def compare(policy: str) -> Mapping[str, Any]:
    """Trains, and compares the loss of every step.

    Raises:
      AssertionError: a loss is not the CPU's.
    """
    losses, wanted = train(policy), json.loads(LOSSES.read_text())[policy]
    for step, (got, expected) in enumerate(zip(losses, wanted, strict=True), 1):
        # Written so that NaN fails.
        assert abs(got - expected) <= TOLERANCE, f"loss {got:.4f} at step {step}, on the CPU {expected:.4f}"
    differs = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
    return {"first_loss": losses[0], "last_loss": losses[-1], "differs": differs}


def lower(policy: str) -> None:
    """Compiles the step's kernels."""
    params = jax.eval_shape(init)
    lower_program(step, policy, params, params, *abstract(*batch_of(0)), jax.ShapeDtypeStruct((), jnp.int32))


def train(policy: str) -> list[float]:
    """Returns the losses of the steps."""
    params = init()
    velocity = jax.tree.map(jnp.zeros_like, params)
    losses = []
    for i in range(STEPS):
        params, velocity, loss = step(policy, params, velocity, *batch_of(i), jnp.int32(i))
        losses.append(float(loss))
    return losses


@functools.partial(jax.jit, static_argnums=0)
def step(policy: str, params: Params, velocity: Params, tokens, targets, number):
    """Returns parameters and velocity after one step of momentum, and the loss before it."""
    key = jax.random.fold_in(jax.random.key(0), number)
    loss, gradients = jax.value_and_grad(loss_of)(params, tokens, targets, policy, key)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, gradients)
    return jax.tree.map(lambda p, v: p - RATE * v, params, velocity), velocity, loss


def loss_of(params: Params, tokens, targets, policy: str, key) -> jax.Array:
    """Returns the mean cross-entropy in nats."""
    x = params["embedding"][tokens].astype(jnp.bfloat16)
    keys = jax.random.split(key, LAYERS)
    x, _ = jax.lax.scan(lambda x, layer: (block(x, *layer, policy), None), x, (params["blocks"], keys))
    logits = jnp.dot(norm(x), params["head"].astype(x.dtype), preferred_element_type=jnp.float32)
    picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def block(x, params: Params, key, policy: str):
    """Returns x [batch, length, WIDTH] after causal attention and a gated MLP, each with its residual."""
    keys = dict(zip(params, jax.random.split(key, len(params)), strict=True))

    def linear(name, x):
        return dot(x, params[name], policy=policy, key=keys[name], preferred_element_type=x.dtype)

    qkv = linear("qkv", norm(x)).reshape(*x.shape[:-1], 3, HEADS, WIDTH // HEADS)
    q, k, v = (qkv[..., i, :, :] for i in range(3))
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")
    x = x + linear("out", attended.reshape(x.shape))
    gate, up = jnp.split(linear("gate_up", norm(x)), 2, axis=-1)
    return x + linear("down", jax.nn.silu(gate) * up)


def norm(x):
    """Returns x over the root of its mean square."""
    square = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return (x * jax.lax.rsqrt(square + 1e-5)).astype(x.dtype)


@jax.jit
def init() -> Params:
    """Returns the parameters, in float32."""
    sizes = {
        "qkv": (WIDTH, 3 * WIDTH),
        "out": (WIDTH, WIDTH),
        "gate_up": (WIDTH, 2 * HIDDEN),
        "down": (HIDDEN, WIDTH),
    }
    key = jax.random.key(0)
    embedding, head, *keys = jax.random.split(key, 2 + len(sizes))
    blocks = {
        name: 0.05 * jax.random.normal(key, (LAYERS, *size))
        for key, (name, size) in zip(keys, sizes.items(), strict=True)
    }
    return {
        "embedding": jax.random.normal(embedding, (VOCABULARY, WIDTH)),
        "head": 0.05 * jax.random.normal(head, (WIDTH, VOCABULARY)),
        "blocks": blocks,
    }


def batch_of(number: int) -> tuple[jax.Array, jax.Array]:
    """Returns tokens and targets [BATCH, LENGTH]: a byte is 5 times the last, plus 0 to 3."""
    random = np.random.RandomState(number)  # its stream is frozen
    walk = np.empty((BATCH, LENGTH + 1), np.int32)
    walk[:, 0] = random.randint(0, VOCABULARY, BATCH)
    for i in range(LENGTH):
        walk[:, i + 1] = (5 * walk[:, i] + random.randint(0, 4, BATCH)) % VOCABULARY
    return jnp.asarray(walk[:, :-1]), jnp.asarray(walk[:, 1:])


def main() -> None:
    """Writes the losses that this machine computes; meant for a CPU."""
    assert jax.default_backend() == "cpu", "the recorded losses are a CPU's: set JAX_PLATFORMS=cpu"
    losses = {policy: [round(loss, 5) for loss in train(policy)] for policy in POLICIES}
    lines = [f'"{policy}": {json.dumps(values)}' for policy, values in losses.items()]
    LOSSES.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
