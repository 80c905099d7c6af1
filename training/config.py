"""The configuration of a run: frozen dataclasses, one a concern, that tyro turns into command-line flags."""

import dataclasses
import pathlib
import re
import time
from typing import Annotated, Literal

import tyro

from mxjax.implementations import Implementation
from mxjax.policy import Policy
from mxjax.recipes import get_policy
from mxjax.remat import Remat
from mxjax.scales import ScaleRule


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW as in MLPerf Training's llama31_8b, with its linear warm-up and cosine decay."""

    lr: float = 4e-3
    """Peak learning rate."""
    warmup_steps: int = 30
    """Steps of linear warm-up."""
    min_lr_ratio: float = 0.1
    """Final learning rate over the peak."""
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-5
    weight_decay: float = 0.1
    """Decoupled; not applied to 1-D parameters (the norms)."""
    clip: float = 1.0
    """Largest global norm of the gradient."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What to train on. Batches are a function of the seed and the step alone."""

    data: tuple[str, ...] = ()
    """A text file, or a folder of them, read as bytes; or the PREFIX of a tokenized dataset, or several:
    PREFIX PREFIX by size, WEIGHT PREFIX WEIGHT PREFIX by weight. Default: Python's own library, as text."""
    eval_data: str | None = None
    """What to evaluate on, all of it. Default: a part of --data that is then not trained on, 5 %."""
    vocab_size: int | None = None
    """Of the model. Default: that of PREFIX.tokenizer.json, or else the model's own; 257 for text."""
    batch_size: int = 16
    """Sequences a step."""
    seq_len: int = 128
    """Tokens a sequence."""

    @property
    def tokens_a_step(self) -> int:
        """Tokens that a step trains on."""
        return self.batch_size * self.seq_len


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
    """In which precision the GEMMs run."""

    policy: str = "wgrad_hadamard"
    """Of the linear layers: a name of mxjax.policies(), or several with the step, or the part of the run,
    from which each holds: 'wgrad_hadamard; fp8 from 0.82'. 'heal' is 'full_hadamard; fp8 from 0.82'."""
    scale_rule: ScaleRule | None = None
    """Replaces the rule for MXFP4 scales of every layer."""
    layers: tuple[str, ...] = ()
    """Exceptions throughout the run, as PATTERN=POLICY, e.g. 'head=fp8' 'blocks.*.mlp.down=bf16', or for the
    first 2 and last 4 blocks 'blocks[:2].*=bf16' 'blocks[-4:].*=bf16'; the last match wins."""
    implementation: Implementation | None = None
    """How the GEMMs run; default, the fastest here."""

    def rules(self) -> list[tuple[str, Policy]]:
        """Returns the layer exceptions as (pattern, policy)."""
        for rule in self.layers:
            if rule.count("=") != 1:
                raise ValueError(f"--layers takes PATTERN=POLICY, got {rule!r}")
        return [(pattern, get_policy(name)) for pattern, name in (rule.split("=") for rule in self.layers)]


@dataclasses.dataclass(frozen=True)
class MLPerfConfig:
    """MLPerf's log of a run, and what it says of who ran it."""

    mllog: bool = False
    """Also write mllog.txt, which MLPerf's compliance checker reads."""
    submission_org: str = "none"
    """Who submits the result."""
    submission_platform: str | None = None
    """What it ran on. Default: the device's name."""
    submission_division: Literal["closed", "open"] = "closed"


@dataclasses.dataclass(frozen=True)
class ObserveConfig:
    """What a run records besides metrics.jsonl; nothing here changes the training."""

    tensorboard: bool = False
    """Also write what metrics.jsonl gets as TensorBoard event files into the run's folder."""
    stats_every: int | None = None
    """At every so many-th step, write the error of each GEMM of each block to metrics.jsonl, measured on at
    most 2048 tokens of the batch."""
    profile: str | None = None
    """Trace the steps FIRST:LAST, both included, into the run's folder, for XProf or Perfetto."""

    @property
    def profiled_steps(self) -> range:
        """The steps to trace; empty for none."""
        found = re.fullmatch(r"([1-9]\d*):(\d+)", self.profile or "")
        return range(int(found[1]), int(found[2]) + 1) if found else range(0)


@dataclasses.dataclass(frozen=True)
class Config:
    """A training run."""

    preset: Literal["mlperf-llama3.1-8b"] | None = None
    """Defaults for all the other flags: MLPerf Training's llama31_8b, at --batch-size sequences a step."""
    precision: Annotated[PrecisionConfig, tyro.conf.arg(name="")] = PrecisionConfig()
    data: Annotated[DataConfig, tyro.conf.arg(name="")] = DataConfig()
    optimizer: Annotated[OptimizerConfig, tyro.conf.arg(name="")] = OptimizerConfig()
    mlperf: Annotated[MLPerfConfig, tyro.conf.arg(name="")] = MLPerfConfig()
    observe: Annotated[ObserveConfig, tyro.conf.arg(name="")] = ObserveConfig()
    model: str = "tiny"
    """A name of models/configs.py; its vocabulary is the data's, see --vocab-size."""
    init: pathlib.Path | None = None
    """Begin with the model and the last weights of this run, which may be an imported checkpoint."""
    mesh: str | None = None
    """How the devices share the work, as AXIS=SIZE,...: data and fsdp cut the batch, fsdp and tensor the
    parameters. A missing axis is 1. Default: fsdp over all devices."""
    distributed: bool = False
    """Be one of several processes that train together, each with the same flags and --out: those of a Slurm,
    Open MPI or Kubernetes job, or else those that JAX_COORDINATOR_ADDRESS (HOST:PORT of the first process),
    JAX_NUM_PROCESSES and JAX_PROCESS_ID (from 0) name."""
    remat: Remat = "none"
    """What a block computes again in the backward pass instead of keeping it. none: nothing; dots: all but
    the results of matrix products and attention; fp4: all but packed MXFP4 operands; full: everything."""
    unroll: int | None = None
    """Blocks that the compiled loop over layers takes in a turn: more compile longer and run faster. Default:
    all on a GPU, one elsewhere."""
    accumulate: int = 1
    """Parts in which a step takes its batch, one after another: less memory, the same gradient."""
    steps: int = 300
    """Length of the run, and of the learning-rate schedule."""
    seed: int = 0
    """Of the weights, the order of the data, and the random bits of the policy."""
    out: pathlib.Path | None = None
    """The run's folder. Default: runs/MODEL-POLICY-TIME."""
    resume: bool = False
    """Continue the run in --out from its last good checkpoint, bit for bit, with all its flags."""
    stop_after: int | None = None
    """Checkpoint and end after this step, as an interrupted run would; --resume continues it."""
    checkpoint_every: int = 100
    """Steps between checkpoints; one is always written at the end."""
    keep_checkpoints: int = 2
    """How many of the newest to keep; in addition that of the lowest evaluation loss."""
    eval_every: int = 100
    """Steps between evaluations; one is always made at the end."""
    eval_batches: int = 32
    """Batches an evaluation reads, from the start of the validation data."""
    eval_sequences: int | None = None
    """Sequences an evaluation reads, exactly; replaces --eval-batches."""
    target_loss: float | None = None
    """End the run once an evaluation's loss is this or less."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What a loss or gradient that is NaN or infinite does: end the run, or leave that step out; ten such
    in a row end it, too. Evidence is saved."""
    spike_factor: float = 2.0
    """Report losses greater than this times the median of the last 100, in spikes.jsonl too; inf for none."""
    log_every: int = 10
    """Steps between printed lines; metrics.jsonl gets every step."""

    def __post_init__(self):
        every = ("checkpoint_every", "eval_every", "log_every")
        for name in ("steps", "eval_batches", "keep_checkpoints", *every):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if self.unroll is not None and self.unroll < 1:
            raise ValueError(f"--unroll must be at least 1, got {self.unroll}")
        if self.accumulate < 1 or self.data.batch_size % self.accumulate:
            raise ValueError(
                f"--accumulate {self.accumulate} must divide --batch-size {self.data.batch_size}"
            )
        if self.data.batch_size < 1 or self.data.seq_len < 1:
            raise ValueError("--batch-size and --seq-len must be at least 1")
        if self.data.vocab_size is not None and self.data.vocab_size < 1:
            raise ValueError(f"--vocab-size must be at least 1, got {self.data.vocab_size}")
        if self.eval_sequences is not None and self.eval_sequences < 1:
            raise ValueError(f"--eval-sequences must be at least 1, got {self.eval_sequences}")
        if self.stop_after is not None and not 0 < self.stop_after <= self.steps:
            raise ValueError(f"--stop-after must be from 1 to --steps {self.steps}, got {self.stop_after}")
        if self.optimizer.lr <= 0 or self.optimizer.warmup_steps < 0:
            raise ValueError("--lr must be positive and --warmup-steps not negative")
        stats_every, profile = self.observe.stats_every, self.observe.profile
        if stats_every is not None and stats_every < 1:
            raise ValueError(f"--stats-every must be at least 1, got {stats_every}")
        traced = self.observe.profiled_steps
        if profile is not None and not (traced and traced[-1] <= self.steps):
            raise ValueError(f"--profile takes FIRST:LAST, from 1 to --steps {self.steps}, got {profile!r}")
        if not self.spike_factor > 1:
            raise ValueError(f"--spike-factor must be greater than 1, got {self.spike_factor}")
        if self.resume and self.out is None:
            raise ValueError("--resume continues the run in --out: name its folder")
        if self.distributed and self.out is None:
            raise ValueError("--distributed needs --out: the folder that all processes share")

    @property
    def last_step(self) -> int:
        """The step after which this invocation ends."""
        return self.steps if self.stop_after is None else self.stop_after

    def folder(self) -> pathlib.Path:
        """Returns the run's folder: `out`, or a new name under runs/."""
        policy = re.sub(r"[^\w.]+", "-", self.precision.policy)
        name = f"{self.model}-{policy}-{time.strftime('%Y%m%d-%H%M%S')}"
        return self.out or pathlib.Path("runs") / name
