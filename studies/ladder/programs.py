"""The compiled programs of a cell, which train all its seeds."""

import dataclasses
import functools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from models import decoder
from mxjax.products.implementations import Implementation, compiler_options
from studies.ladder.cells import Bits, Cell, Protocol, model_of, policy_of, protocol_of, recipe_of
from training.config import OptimizerConfig, parse_rules
from training.data.megatron import MegatronCorpus
from training.optimizer.bfloat16 import as_float32, with_bfloat16_parameters
from training.optimizer.deoscillation import check_policies, parse_deoscillation, snap_oscillating
from training.optimizer.optimizers import keeps_finite, make_optimizer
from training.optimizer.schedule import learning_rate
from training.step import ScheduledStep, evaluate, init_state, make_eval_step, make_train_step

IMPLEMENTATION: Implementation = "xla"
"""Every cell's: it multiplies the exact values in bfloat16, so that only the policy varies."""
OUTLIER_FACTOR = 16.0
"""Ratio of outlier channels to the others; a power of two, so that float32 computes the same function."""


class Programs:
    """A cell's compiled functions, which all its seeds share.

    Attributes:
      compile_seconds: time to compile the training step, waits for a run that trains meanwhile included.
      step_bytes: memory of the state, a batch and temporaries.
    """

    compilations_a_run = 0

    def __init__(self, cell: Cell, corpus: MegatronCorpus):
        """Compiles what a cell runs; raises ValueError if its recipe has no effect on the model."""
        self.corpus, self.protocol = corpus, protocol_of(cell)
        p = self.protocol
        model = dataclasses.replace(model_of(cell), vocab_size=corpus.vocab_size)
        config = OptimizerConfig(
            p.lr, p.warmup, eps=p.eps, optimizer=p.optimizer, moments=p.moments, master=p.master
        )
        optimizer = make_optimizer(config, model)
        if p.bfloat16_gradients:
            optimizer = optax.chain(optax.stateless(to_bfloat16), optimizer)
        recipe = recipe_of(cell)
        rules = parse_rules(recipe.layers) if recipe else ()
        policy = policy_of(cell)
        self.policy = str(policy)
        policies = decoder.layer_policies(model, policy, rules)
        if recipe and recipe.deoscillate:
            setting = parse_deoscillation(recipe.deoscillate)
            check_policies([policies])
            optimizer = optax.chain(optimizer, snap_oscillating(setting, policies))
        if p.master == "bfloat16":
            optimizer = with_bfloat16_parameters(optimizer)
        options = {"policies": policies, "implementation": IMPLEMENTATION}
        loss = functools.partial(_call, decoder.mean_loss, model, options, bits=p.bits)
        losses = functools.partial(_call, decoder.losses, model, options)
        self.schedule = learning_rate(config, p.horizon or p.steps)

        def first_state(key):
            params = with_outliers(decoder.init(model, key), p.outlier_channels)
            return init_state(jax.tree.map(lambda w: w.astype(jnp.dtype(p.master)), params), optimizer)

        self.first_state: Any = jax.jit(first_state)
        self.held_out = held_out_batches(corpus.validation, p)
        options = compiler_options(policies.policies, IMPLEMENTATION)
        certain = None if recipe and recipe.deoscillate else keeps_finite(config)
        train_step = make_train_step(loss, optimizer, compiler_options=options, keeps_finite=certain)
        self._compile(train_step, make_eval_step(losses, options))

    def train(self, seed: int) -> dict[str, Any]:
        """Trains one run; returns its evaluations, the losses of its steps, and its time."""
        p = self.protocol
        key = jax.random.key(seed)
        state = self.first_state(jax.random.fold_in(key, 2**32 - 1))  # no step has this key, as in train.py
        samples = self.corpus.samples(p.seq, seed, p.steps * p.batch)
        due = {round(p.steps * (i + 1) / p.evaluations) for i in range(p.evaluations)}
        losses, evaluations = [], []
        began = time.perf_counter()
        for step in range(1, p.steps + 1):
            batch = np.stack([samples[i] for i in range((step - 1) * p.batch, step * p.batch)])
            state, metrics = self.train_step(state, batch, key)
            losses.append(metrics.loss)
            if step in due:
                found = evaluate(self.eval_step, state.params, self.held_out)["eval_loss"]
                evaluations.append([step * p.batch * p.seq, round(found, 6)])
                if not math.isfinite(found) or not bool(state.finite):
                    break
        seconds = time.perf_counter() - began
        return {
            "evaluations": evaluations,
            "losses": [float(loss) for loss in jax.device_get(losses)],
            "finite": bool(state.finite),
            "seconds": seconds,
        }

    def _compile(self, train_step: Any, eval_step: Any) -> None:
        p, key = self.protocol, jax.random.key(0)
        sample = self.corpus.samples(p.seq, 0, 1)[0]
        batch = jax.ShapeDtypeStruct((p.batch, *sample.shape), sample.dtype)
        state = jax.eval_shape(self.first_state, key)
        self.first_state = self.first_state.lower(key).compile()
        began = time.perf_counter()
        compiled = train_step.lower(state, batch, key, jax.eval_shape(self.schedule, state.step)).compile()
        self.compile_seconds = round(time.perf_counter() - began, 2)
        self.step_bytes = _kept_bytes(compiled)
        self.train_step = ScheduledStep(compiled, self.schedule)
        self.eval_step = eval_step.lower(state.params, self.held_out[0], key).compile()


def with_outliers(params: decoder.Params, channels: int) -> decoder.Params:
    """Returns the parameters with outliers in the first channels of every normalized activation.

    The scales of the blocks' norms are OUTLIER_FACTOR times as large there, and the weights that read those
    channels as much smaller, so that the model computes the same function. 0 channels change nothing.
    """
    if not channels:
        return params
    factor = jnp.ones(params["norm"]["scale"].shape).at[:channels].set(OUTLIER_FACTOR)
    blocks = dict(params["blocks"])
    for norm, module, matrix in (("attention_norm", "attention", "qkv"), ("mlp_norm", "mlp", "gate_up")):
        blocks[norm] = {"scale": blocks[norm]["scale"] * factor[None]}
        blocks[module] = blocks[module] | {matrix: blocks[module][matrix] / factor[None, :, None]}
    return params | {"blocks": blocks}


def held_out_batches(tokens: np.ndarray, protocol: Protocol) -> list[np.ndarray]:
    """Returns all full batches of the validation tokens, so that one program evaluates them all."""
    n = (len(tokens) - 1) // protocol.seq // protocol.batch
    if not n:
        raise ValueError(
            f"--eval-data has {len(tokens):,} tokens, fewer than a batch of {protocol.batch} x {protocol.seq}"
        )
    rows = range(0, n * protocol.batch * protocol.seq, protocol.seq)
    windows = np.stack([tokens[i : i + protocol.seq + 1].astype(np.int32) for i in rows])
    return np.split(windows, n)


def _kept_bytes(compiled: Any) -> int | None:
    memory = compiled.memory_analysis()
    if memory is None:
        return None
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return kept + memory.temp_size_in_bytes


def _call(function, model, options, params, batch, key, bits: Bits = "fresh"):
    return function(model, as_float32(params), batch, key=drawing(key, bits), **options)


def drawing(key: jax.Array, bits: Bits) -> jax.Array:
    """Returns the key that a step draws from: its own, or in some steps the same in all of them."""
    if bits == "fresh":
        return key
    frozen = jax.random.key_data(jax.random.key(0))
    defective = bits == "frozen" or jax.random.randint(key, (), 0, 3) == 0
    return jax.random.wrap_key_data(jnp.where(defective, frozen, jax.random.key_data(key)))


def to_bfloat16(updates: Any, params: Any = None) -> Any:
    """Returns gradients rounded to bfloat16, in their own dtype."""
    del params
    # XLA may drop a conversion there and back.
    return jax.tree.map(lambda g: lax.reduce_precision(g, exponent_bits=8, mantissa_bits=7), updates)
