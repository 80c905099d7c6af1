"""Trains the cells of a study; each finished run is one JSON file, and existing files are not repeated.

All policies of a seed have the same initial weights and the same batches. All seeds of a cell share one
compilation. Several processes, one a GPU, share the cells through file locks.
"""

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import functools
import json
import math
import os
import pathlib
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.study.cells import PROTOCOLS, Cell, Protocol, policy_of
from models import llama
from models.configs import LlamaConfig, get_config
from training.config import DataConfig, OptimizerConfig, parse_rules
from training.data.megatron import MegatronCorpus, load_megatron
from training.deoscillation import deoscillation_hook, parse_deoscillation
from training.environment import facts
from training.files import write_atomically
from training.learning_rate import learning_rate
from training.optimizer import make_optimizer
from training.recipes import RECIPES
from training.step import evaluate, init_state, make_eval_step, make_train_step, scheduled
from training.weight_hooks import with_hook

IMPLEMENTATION = "xla"
"""Every cell's: it multiplies the exact values in bfloat16, so that only the policy varies."""
OUTLIER_FACTOR = 16.0
"""Ratio of outlier channels to the others; a power of two, so that float32 computes the same function."""
_COMPILATION = 60.0  # seconds to allow for a cell's first run, until one has been timed


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a study.

    Attributes:
      study: name for the record.
      out: folder of the runs' JSON files.
      data, eval_data: prefixes of tokenized datasets.
      vocab_size: vocabulary of the data and the models.
      commit: commit of the code, for the record.
      deadline: `time.monotonic()` by which every run must have ended; None for no limit.
    """

    study: str
    out: pathlib.Path
    data: str
    eval_data: str
    vocab_size: int
    commit: str
    deadline: float | None = None


def run_path(out: pathlib.Path, cell: Cell, seed: int) -> pathlib.Path:
    """Returns the path of one run's file."""
    return out / f"{cell.name}.s{seed}.json"


def missing_seeds(out: pathlib.Path, cell: Cell) -> list[int]:
    """Returns the seeds of a cell that have no file yet."""
    return [seed for seed in range(cell.seeds) if not run_path(out, cell, seed).exists()]


def run_cells(cells: Sequence[Cell], settings: Settings) -> bool:
    """Trains the missing runs in order; returns False if the time did not suffice.

    Skips cells that another process is training. A cell is compiled while the one before it trains.
    """
    settings.out.mkdir(parents=True, exist_ok=True)
    data = DataConfig(data=(settings.data,), eval_data=settings.eval_data, vocab_size=settings.vocab_size)
    corpus = load_megatron(data, settings.vocab_size)
    with contextlib.ExitStack() as claims, concurrent.futures.ThreadPoolExecutor(1) as compiler:
        mine = _claimed_cells(cells, settings.out, claims)
        cell, programs = next(mine, None), None
        while cell is not None:
            if programs is None:
                if not _fits(cell, settings, compiles=True):
                    return False
                programs = compiler.submit(Programs, cell, corpus)
            programs.result()
            following = next(mine, None)
            soon = following and _fits(following, settings, compiles=True, after=cell)
            ahead = compiler.submit(Programs, following, corpus) if soon else None
            if not run_cell(cell, cells, programs.result(), settings):
                return False
            cell, programs = following, ahead
    return True


def run_cell(cell: Cell, cells: Sequence[Cell], programs: "Programs", settings: Settings) -> bool:
    """Trains the missing seeds of a cell; returns whether the time sufficed."""
    for seed in missing_seeds(settings.out, cell):
        if not _fits(cell, settings, compiles=False):
            return False
        outcome = programs.train(seed)
        record = {"study": settings.study, "commit": settings.commit, **outcome}
        write_atomically(run_path(settings.out, cell, seed), json.dumps(record) + "\n")
        left = sum(len(missing_seeds(settings.out, c)) for c in cells)
        print(
            f"{cell.name} seed {seed}: final loss {outcome['final_loss']:.4f}, {outcome['seconds']:.1f} s; "
            f"{left} runs left, about {remaining_seconds(cells, settings.out) / 60:.0f} min of one device",
            flush=True,
        )
    return True


class Programs:
    """A cell's compiled functions, which all its seeds share."""

    def __init__(self, cell: Cell, corpus: MegatronCorpus):
        """Compiles what a cell runs."""
        self.cell, self.corpus, self.protocol = cell, corpus, PROTOCOLS[cell.protocol]
        p = self.protocol
        self.model = model_of(cell, corpus.vocab_size)
        self.data = DataConfig(batch_size=p.batch, seq_len=p.seq)
        config = OptimizerConfig(lr=p.lr, warmup_steps=p.warmup)
        optimizer = make_optimizer(config)
        recipe = RECIPES.get(cell.policy)
        rules = parse_rules(recipe.layers) if recipe else ()
        self.policy = policy_of(cell)
        policies = llama.layer_policies(self.model, self.policy, rules)
        if recipe and recipe.deoscillate:
            setting = parse_deoscillation(recipe.deoscillate)
            optimizer = with_hook(optimizer, deoscillation_hook(setting, policies))
        options = {"policies": policies, "implementation": IMPLEMENTATION}
        loss = functools.partial(_call, llama.mean_loss, self.model, options)
        losses = functools.partial(_call, llama.losses, self.model, options)
        self.schedule = learning_rate(config, p.horizon or p.steps)
        self.first_state = jax.jit(
            lambda key: init_state(with_outliers(llama.init(self.model, key), p.outlier_channels), optimizer)
        )
        self.held_out = held_out_batches(corpus.validation, p)
        self._compile(make_train_step(loss, optimizer), make_eval_step(losses))

    def train(self, seed: int) -> dict[str, Any]:
        """Trains one run and returns its record."""
        p, cell = self.protocol, self.cell
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
        train_losses = np.array(jax.device_get(losses), np.float64)
        return {
            "cell": cell.name,
            "policy": cell.policy,
            "rules": cell.rules,
            "seed": seed,
            "model": cell.model,
            "parameters": self.model.n_params,
            "protocol": {"name": cell.protocol, **dataclasses.asdict(p)},
            "resolved_policy": str(self.policy),
            "implementation": IMPLEMENTATION,
            "tokens": len(losses) * p.batch * p.seq,
            "final_loss": evaluations[-1][1] if bool(state.finite) else float("nan"),
            "evaluations": evaluations,
            "train_losses": [round(float(x.mean()), 5) for x in np.array_split(train_losses, p.evaluations)],
            "finite": bool(state.finite),
            "seconds": round(seconds, 2),
            "compile_seconds": round(self.compile_seconds, 2),
            "step_bytes": self.step_bytes,
            "data": self.corpus.facts | {"source": os.path.basename(self.corpus.source)},
            "device": jax.devices()[0].device_kind,
            "versions": facts(),
        }

    def _compile(self, train_step: Any, eval_step: Any) -> None:
        """Compiles both for arrays of the data's types; notes the training step's time and memory.

        The memory is that of the state, a batch and temporaries.
        """
        p, key = self.protocol, jax.random.key(0)
        sample = self.corpus.samples(p.seq, 0, 1)[0]
        batch = jax.ShapeDtypeStruct((p.batch, *sample.shape), sample.dtype)
        state = jax.eval_shape(self.first_state, key)
        self.first_state = self.first_state.lower(key).compile()
        began = time.perf_counter()
        compiled = train_step.lower(state, batch, key, jax.eval_shape(self.schedule, state.step)).compile()
        self.compile_seconds = time.perf_counter() - began
        self.step_bytes = _kept_bytes(compiled)
        self.train_step = scheduled(compiled, self.schedule)
        self.eval_step = eval_step.lower(state.params, self.held_out[0], key).compile()


def model_of(cell: Cell, vocab_size: int) -> LlamaConfig:
    """Returns the cell's Llama, with the vocabulary of the data."""
    return dataclasses.replace(get_config(cell.model), vocab_size=vocab_size)


def with_outliers(params: llama.Params, channels: int) -> llama.Params:
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


def remaining_seconds(cells: Sequence[Cell], out: pathlib.Path) -> float:
    """Estimates the time of the missing runs on one device from the existing runs; NaN if there are none."""
    timed = [_seconds_a_token(cell, out) for cell in cells]
    known = [t for t in timed if t]
    typical = sum(known) / len(known) if known else math.nan
    return sum(
        len(missing_seeds(out, cell)) * PROTOCOLS[cell.protocol].tokens * (t or typical)
        for cell, t in zip(cells, timed, strict=True)
    )


def current_commit() -> str:
    """Returns the commit of the checkout, marked if files differ from it; "unknown" outside git."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _kept_bytes(compiled: Any) -> int | None:
    memory = compiled.memory_analysis()
    if memory is None:
        return None
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return kept + memory.temp_size_in_bytes


def _call(function, model, options, params, batch, key):
    return function(model, params, batch, key=key, **options)


def _fits(cell: Cell, settings: Settings, *, compiles: bool, after: Cell | None = None) -> bool:
    """Whether a run of the cell, after another's missing runs, is expected to end before the deadline.

    Says so if it is not, unless another goes first.
    """
    if settings.deadline is None:
        return True
    runs = [(cell, 1)] + ([(after, len(missing_seeds(settings.out, after)))] if after else [])
    seconds = sum(n * _run_seconds(c, settings.out) for c, n in runs) + (_COMPILATION if compiles else 0)
    fits = time.monotonic() + seconds < settings.deadline
    if not fits and after is None:
        print(f"{cell.name}: no time left for another run; the same command continues later", flush=True)
    return fits


def _run_seconds(cell: Cell, out: pathlib.Path) -> float:
    """Returns the time to allow for a run."""
    return 1.15 * PROTOCOLS[cell.protocol].tokens * (_seconds_a_token(cell, out) or 0.0)


def _seconds_a_token(cell: Cell, out: pathlib.Path) -> float | None:
    """Returns the slowest of a few runs of the same model, None if there are none."""
    records = [json.loads(path.read_text()) for path in sorted(out.glob(f"*.{cell.model}.*.json"))[-8:]]
    return max((record["seconds"] / record["tokens"] for record in records), default=None)


def _claimed_cells(cells: Sequence[Cell], out: pathlib.Path, claims: contextlib.ExitStack) -> Iterator[Cell]:
    """Yields cells with missing runs that no other process claimed; claims them until the stack ends."""
    for cell in cells:
        if missing_seeds(out, cell) and claims.enter_context(_claimed(out / f".{cell.name}.lock")):
            yield cell


@contextlib.contextmanager
def _claimed(path: pathlib.Path) -> Iterator[bool]:
    """Tries to take a lock that lasts as long as the process; yields whether it did."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
