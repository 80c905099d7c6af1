"""Programs of training/test_mesh.py on 8 virtual devices, in processes of their own: JAX fixes it at start.

`python tests/support/meshes.py curves` runs every policy of the ladder on every mesh, in half an hour.
"""

import dataclasses
import functools
import itertools
import json
import math
import pathlib
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mxjax
from models import decoder
from models import loss as pieces
from models.attention.documents import Documents
from models.configs import DecoderConfig
from training import sharding as parameter_sharding
from training.config import OptimizerConfig
from training.memory import step_memory
from training.optimizer.delayed import is_delayed, scales_of, with_histories, without_histories
from training.optimizer.optimizers import keeps_finite, make_optimizer
from training.optimizer.schedule import learning_rate
from training.process.environment import enable_compilation_cache
from training.run.checkpoints import Checkpoints
from training.sharding import filled_size, global_batch, make_mesh, on_mesh, resize, resize_on
from training.step import ScheduledStep, init_state, make_eval_step, make_train_step

# Every axis has 8 whole blocks and rotations of 32.
MODEL = DecoderConfig(256, 256, 2, 8, 8, 32, 256, rope_theta=10_000.0)
STEPS, BATCH, LENGTH = 3, 8, 32
PIECES = pieces.LOSS_TOKENS, pieces.FP8_LOGITS
SHAPES = [shape for shape in itertools.product((1, 2, 4, 8), repeat=3) if np.prod(shape) <= 8]
LADDER = [name for name in mxjax.policies() if name.startswith(("bf16", "fp8", "fprop", "wgrad", "full"))]


def mesh_of(shape) -> Mesh:
    """Returns the first devices as a mesh, from its text or the sizes of data, fsdp and tensor."""
    if not isinstance(shape, str):
        shape = "data={},fsdp={},tensor={}".format(*shape)
    devices = math.prod(int(size) for size in re.findall(r"\d+", shape))
    return make_mesh(shape, jax.devices()[:devices])


class OnMesh:
    """A training state on the first devices, in a mesh of a shape, and its step."""

    def __init__(
        self,
        policy: str,
        shape,
        implementation=None,
        remat="none",
        accumulate=1,
        model=MODEL,
        dtype: Any = jnp.float32,
        head: str = "bf16",
        documents: Documents | None = None,
    ):
        # In float32 around the linear layers, where the order of sums changes least.
        rules = [("blocks.*.attention.[sv]*", mxjax.get_policy("fp32"))] if dtype == jnp.float32 else []
        rules.append(("head", mxjax.get_policy(head)))
        self.policies = policies = decoder.layer_policies(model, mxjax.get_policy(policy), rules)
        config = OptimizerConfig(lr=0.3, eps=1.0, warmup_steps=1)  # as SGD: Adam enlarges small differences
        optimizer = with_histories(make_optimizer(config), model, [policies], policies)
        schedule = learning_rate(config, 10)
        self.mesh = mesh_of(shape)

        options = {
            "policies": policies,
            "dtype": dtype,
            "implementation": implementation,
            "remat": remat,
            "documents": documents,
        }

        def loss(params, batch, key, scales=None):
            return decoder.mean_loss(model, params, batch, key=key, slots=scales, **options)

        def losses(params, batch, key):
            current = options | {"policies": without_histories(policies)}
            return decoder.losses(model, params, batch, key=key, **current)

        parameter_sharding.check_shards(self.mesh.shape, model, policies)
        with jax.set_mesh(self.mesh):
            fill = functools.partial(resize, size=filled_size(self.mesh.shape, model, [policies]))
            first = parameter_sharding.first_state(model, optimizer, self.mesh, jax.random.key(0), fill)
        self.state, self.shardings = first
        self.program = make_train_step(
            loss,
            optimizer,
            accumulate=accumulate,
            shardings=self.shardings,
            keeps_finite=keeps_finite(config),
            scales_of=functools.partial(scales_of, model=model) if is_delayed(policies) else None,
        )
        self.step = ScheduledStep(self.program, schedule)
        self.eval_step = on_mesh(self.mesh, make_eval_step(losses))

    def run(self, batches) -> list[float]:
        """Returns the losses of the batches' steps, then the gradients' norms."""
        found = []
        with jax.set_mesh(self.mesh):
            for batch in batches:
                self.state, metrics = self.step(self.state, global_batch(self.mesh, batch), jax.random.key(0))
                found.append((float(metrics.loss), float(metrics.grad_norm)))
        same = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), self.state, self.shardings)
        assert all(jax.tree.leaves(same)), same
        return [value for values in zip(*found, strict=True) for value in values]

    def lower(self, batch):
        """Returns the lowered step."""
        return self.program.lower(self.state, global_batch(self.mesh, batch), jax.random.key(0), jnp.ones(()))

    def evaluate(self, batch) -> float:
        """Returns the loss of all but one sequence of the batch, which no mesh divides."""
        with jax.set_mesh(self.mesh):
            return float(self.eval_step(self.state.params, batch[:-1], jax.random.key(0)))


def all_batches() -> np.ndarray:
    return np.random.default_rng(0).integers(0, MODEL.vocab_size, (STEPS, BATCH, LENGTH + 1), np.int32)


def curves(*pairs: str) -> None:
    """For each POLICY:DATA,FSDP,TENSOR prints how far its losses are, relatively, from one device's.

    That of an evaluation too where :evaluate follows, with a mask of documents; without pairs, for all there
    are. POLICY+fp8 has the head in FP8 as on GPUs, and pieces of few tokens.
    """
    chosen = [pair.split(":") for pair in pairs] or [
        [policy, ",".join(map(str, shape)), "evaluate"] for policy, shape in itertools.product(LADDER, SHAPES)
    ]

    @functools.cache
    def losses(policy: str, shape: str, *evaluate: str) -> list[float]:
        documents = Documents(7, restart_positions=True) if evaluate else None
        policy, _, head = policy.partition("+")
        pieces.LOSS_TOKENS, pieces.FP8_LOGITS = (16, 16 * MODEL.vocab_size) if head else PIECES
        of_head = {"implementation": "fp8_carriers", "head": head} if head else {}
        on = OnMesh(policy, tuple(map(int, shape.split(","))), documents=documents, **of_head)
        batches = all_batches()
        return on.run(batches) + [on.evaluate(batches[-1]) for _ in evaluate]

    for policy, shape, *evaluate in chosen:
        found, wanted = losses(policy, shape, *evaluate), losses(policy, "1,1,1", *evaluate)
        errors = [abs(a / b - 1) for a, b in zip(found, wanted, strict=True)]
        print(json.dumps({"policy": policy, "shape": shape, "losses": found, "errors": errors}), flush=True)


def vocabulary(*cases: str) -> None:
    """For each TIED:HEAD, the head's policy, trains 257 tokens on tensor=2 and on one device.

    Prints how far the losses are, the vocabulary of the state, the largest filler in it, and whether resizing
    and back gives the state.
    """
    for case in cases:
        tied, head = case.split(":")
        model = dataclasses.replace(MODEL, vocab_size=257, tied=tied == "tied")
        batches = np.random.default_rng(0).integers(0, 257, (STEPS, BATCH, LENGTH + 1), np.int32)
        found = {}
        for shape in ((1, 1, 1), (1, 2, 2)):
            on = OnMesh("wgrad", shape, model=model, head=head)
            found[shape] = [*on.run(batches), on.evaluate(batches[-1])]
        errors = [abs(a / b - 1) for a, b in zip(*found.values(), strict=True)]
        own = resize_on(on.mesh, on.state, 257)
        again = resize_on(on.mesh, own, on.state.params["embedding"].shape[0])
        same = jax.tree.map(lambda a, b: bool((a == b).all()) and a.sharding == b.sharding, again, on.state)
        record = {
            "errors": errors,
            "shapes": [on.state.params["embedding"].shape[0], own.params["embedding"].shape[0]],
            "filler": max(float(jnp.abs(x[257:]).max()) for x in moments(on.state)),
            "same": all(jax.tree.leaves(same)),
        }
        print(json.dumps({"case": case} | record), flush=True)


def moments(state) -> list[jax.Array]:
    """Returns the embedding, the transposed head, and their moments."""
    leaves = jax.tree.leaves_with_path(state)
    named = [(getattr(path[-1], "key", None), x) for path, x in leaves]
    return [x.T if name == "head" else x for name, x in named if name in ("embedding", "head")]


def restore(folder: str) -> None:
    """Saves a state on fsdp=8 and restores it on another mesh and on one device."""
    saved = OnMesh("bf16", (1, 8, 1)).state
    with Checkpoints(pathlib.Path(folder)) as checkpoints:
        checkpoints.save(saved, {"next_index": 0})
    for shape in ((2, 2, 2), "context=2,fsdp=2,tensor=2", (1, 1, 1)):
        like = OnMesh("bf16", shape)
        with Checkpoints(pathlib.Path(folder)) as checkpoints:
            found, position = checkpoints.restore(like.state)
        assert position == {"next_index": 0}
        for a, b, s in zip(*map(jax.tree.leaves, (found, saved, like.shardings)), strict=True):
            assert a.sharding.is_equivalent_to(s, a.ndim)
            np.testing.assert_array_equal(a, b)


def nonfinite() -> None:
    """For each mesh prints of three steps whether they were finite, changed the weight and had a finite loss.

    In the second, one device's part of the gradient has a NaN.
    """

    @jax.custom_vjp
    def spoil(w, bad):
        return w

    spoil.defvjp(lambda w, bad: (w, bad), lambda bad, g: (g.at[-1, 0].add(jnp.where(bad, jnp.nan, 0)), None))

    def loss(params, batch, key):
        return jnp.mean((jax.nn.one_hot(batch, 16) @ spoil(params["w"], jnp.any(batch == 3))) ** 2)

    optimizer, start = optax.adam(0.5), {"w": jnp.ones((16, 16))}
    clean = np.tile(np.arange(8, 16, dtype=np.int32)[:, None], (1, 4))
    for shape in [(1, 1, 1), (8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2)]:
        mesh = mesh_of(shape)
        first = init_state(start, optimizer)
        specs = jax.tree.map(lambda x: P("fsdp", "tensor") if x.ndim == 2 else P(), first)
        shardings = jax.tree.map(functools.partial(NamedSharding, mesh), specs)
        step = make_train_step(
            loss,
            optimizer,
            skip_nonfinite=True,
            shardings=shardings,
            keeps_finite=lambda rate: jnp.array(True),  # so that gradients alone are checked
        )
        with jax.set_mesh(mesh):
            state, found = jax.device_put(jax.tree.map(jnp.copy, first), shardings), []
            for i in range(3):
                batch = np.where((np.arange(8) == 7)[:, None] & (i == 1), 3, clean)  # the last sequence
                before = np.asarray(state.params["w"])
                state, metrics = step(state, global_batch(mesh, batch), jax.random.key(0), jnp.ones(()))
                changed = not np.array_equal(before, state.params["w"])
                found.append([bool(metrics.finite), changed, bool(np.isfinite(metrics.loss))])
        print(json.dumps({"steps": found, "skipped": int(state.skipped)}), flush=True)


def compile_step(policy: str, shape: str, implementation: str) -> None:
    """Compiles a step with all its loops, for XLA_FLAGS to dump."""
    pieces.LOSS_TOKENS = 16
    on = OnMesh(policy, tuple(map(int, shape.split(","))), implementation, remat="full", accumulate=2)
    with jax.set_mesh(on.mesh):
        on.lower(all_batches()[0]).compile()


def memory(*cases: str) -> None:
    """For each DATA,FSDP,TENSOR:POLICY:REMAT:VOCABULARY prints the estimate of a step's memory, and what XLA
    allocates on a device, in bytes."""
    for case in cases:
        shape, policy, remat, vocab = case.split(":")
        model = DecoderConfig(int(vocab), 128, 4, 4, 4, 32, 384, rope_theta=10_000.0)
        on = OnMesh(policy, tuple(map(int, shape.split(","))), remat=remat, model=model, dtype=jnp.bfloat16)
        batch = np.zeros((BATCH, 129), np.int32)
        with jax.set_mesh(make_mesh(devices=jax.devices()[:1])):
            estimate = step_memory(
                model,
                on.policies,
                on.state.params,
                on.state.opt_state,
                batch_size=BATCH,
                seq_len=128,
                mesh=on.mesh.shape,
                remat=remat,
            )
        with jax.set_mesh(on.mesh):
            step = on.lower(batch).compile()
        m = step.memory_analysis()
        held = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
        print(json.dumps({"case": case, "estimate": estimate, "allocated": held + m.temp_size_in_bytes}))


if __name__ == "__main__":
    if sys.argv[1] == "curves":
        enable_compilation_cache()
    programs = {"curves": curves, "restore": restore, "compile": compile_step, "memory": memory}
    programs["nonfinite"] = nonfinite
    (programs | {"vocabulary": vocabulary})[sys.argv[1]](*sys.argv[2:])
