"""The largest inputs of a model's linear layers on a few sequences, for consumers that round activations."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models import decoder
from models.configs import DecoderConfig
from models.gemms import LINEAR_LAYERS
from mxjax.policy.layers import LayerPolicies
from mxjax.recipes import get_policy
from mxjax.stats.layers import Amax
from training.config import DataConfig
from training.data.load import load_held_out
from training.data.text import evaluation_batches
from training.run.record import documents_of_run
from training.run.tokens import check_tokens_of

_SEQUENCES = 16


def largest_inputs(
    run: pathlib.Path,
    saved: dict[str, Any],
    config: DecoderConfig,
    params: decoder.Params,
    policies: LayerPolicies | None,
    data: str,
) -> dict[str, float]:
    """Returns the largest magnitude of each linear layer's input, by the names of our layers and "head".

    The experts of a layer share the largest of all their inputs, since a few sequences may not reach each.

    Args:
      run: the run's folder, whose tokenizer the data must have.
      saved: config.json of the run, whose length of sequences and mask of documents hold.
      policies: the precision in which the model runs; None is bfloat16.
      data: text or dataset PREFIX, of which the first 16 sequences are read.
    Raises:
      ValueError: the data cannot be read or has other tokens, or inputs are not finite.
    """
    policies = policies or decoder.layer_policies(config, get_policy("bf16"))
    seq_len, documents = saved["config"]["data"]["seq_len"], documents_of_run(saved)
    check_tokens_of(run, "--calibrate", data)
    tokens = load_held_out(data, config.vocab_size, True, seq_len, "--calibrate")
    seq_len = min(seq_len, max(len(tokens) - 1, 1))
    shape = DataConfig(vocab_size=config.vocab_size, batch_size=1, seq_len=seq_len)
    zeros = jnp.zeros(config.n_layers)

    @jax.jit
    def largest(params, batch):
        def output(slots):
            model = nnx.merge(decoder.graph(config), params)
            options = {"key": jax.random.key(0), "slots": slots, "documents": documents}
            x, _, _ = model.hidden(batch, policies=policies, **options)
            return jnp.sum(x.astype(jnp.float32)), jnp.max(jnp.abs(x)).astype(jnp.float32)

        found, head = jax.grad(output, has_aux=True)(dict.fromkeys(LINEAR_LAYERS, Amax(zeros, zeros, zeros)))
        return {name: amax.x for name, amax in found.items()}, head

    batches = evaluation_batches(tokens, shape, _SEQUENCES, config.vocab_size)
    each = [jax.device_get(largest(params, batch[:, :-1])) for batch in batches]
    layers, head = jax.tree.map(lambda *values: np.max(values, axis=0), *each)
    found = {f"blocks.{i}.{name}": float(amax[i]) for name, amax in layers.items() for i in range(len(amax))}
    found["head"] = float(head)
    if bad := [name for name, amax in found.items() if not np.isfinite(amax)]:
        raise ValueError(f"--calibrate {data}: the inputs of {bad[0]} hold NaN or infinity")
    return found
