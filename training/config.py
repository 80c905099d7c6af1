"""The configuration of a run: one frozen dataclass per concern, whose fields tyro turns into flags.

The docstrings of the fields are the help that users read. A number out of its range ends the run before it
begins.
"""

import contextlib
import dataclasses
import pathlib
import re
import time
import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import tyro

from models.experts.traffic import Traffic
from mxjax.numerics.scales import ScaleRule
from mxjax.policy import Policy
from mxjax.products.implementations import Implementation
from mxjax.runtime.remat import Remat
from training.data.evaluation_sets import absolute_eval_data, parse_eval_data
from training.files import absolute_path, make_absolute
from training.flags.policy_source import label, load_policy
from training.flags.ranges import COUNT, POSITIVE, SEED, Range, at_most, check_ranges
from training.optimizer.config import RANGES as OPTIMIZER_RANGES
from training.optimizer.config import OptimizerConfig, check_effect, check_logged

_RANGES: Mapping[str, Range] = types.MappingProxyType(
    dict(OPTIMIZER_RANGES)
    | {
        "seed": SEED,
        "devices": at_most(1024),
        "target_loss": POSITIVE,
        "spike_factor": Range("greater than 1", lambda x: x > 1),
    }
    | dict.fromkeys(("steps", "batch_size", "seq_len", "vocab_size", "accumulate", "unroll", "lora"), COUNT)
    | dict.fromkeys(("checkpoint_every", "keep_checkpoints", "log_every", "stats_every"), COUNT)
    | dict.fromkeys(("eval_every", "eval_batches", "eval_sequences"), COUNT)
)


_POLICY = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="POLICY",
    instance_from_str=lambda words: words[0],
    is_instance=lambda value: isinstance(value, str | Policy),
    str_from_instance=lambda value: [label(value)],
)
"""How tyro reads a policy: as text, which is resolved when the model is known."""


def _make_tuples(config: object, *names: str) -> None:
    """Makes tuples of the lists that a program gave for these fields, so that they equal those of a record.

    Raises:
      TypeError: one of them is a text.
    """
    for name in names:
        value = getattr(config, name)
        if isinstance(value, str):
            raise TypeError(f"{name} must be a tuple of texts, got {value!r:.60}; write ({value!r:.60},)")
        object.__setattr__(config, name, tuple(value))


def _is_number(text: str) -> bool:
    with contextlib.suppress(ValueError):
        float(text)
        return True
    return False


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The training data. Batches are a function of the seed and the step alone."""

    data: tuple[str, ...] = ()
    """A text file or a folder of text files, read as bytes; or tokenized datasets: PREFIX, PREFIX PREFIX ...
    (mixed by size) or WEIGHT PREFIX WEIGHT PREFIX ... Default: the source of Python's standard library."""
    eval_data: tuple[str, ...] = ()
    """Text or dataset PREFIX to evaluate on, or several as NAME=PREFIX NAME=PREFIX ...; the loss of the first
    decides --target-loss and the best checkpoint. Default: 5 % of --data, which training does not read."""
    vocab_size: int | None = None
    """Vocabulary of the model. Default: that of PREFIX.tokenizer.json, or else the model's own; 257 for
    text."""
    batch_size: int = 16
    """Sequences a step."""
    seq_len: int = 128
    """Tokens a sequence."""
    document_mask: Literal["on", "off"] | None = None
    """on: attention stays within a document; off: it sees all earlier tokens of a sequence. Default: on where
    a token ends each document, as in text and with --append-eod."""
    restart_positions: bool = False
    """Count positions from the start of each document, not of the sequence. Needs the mask."""

    def __post_init__(self):
        _make_tuples(self, "data", "eval_data")
        object.__setattr__(self, "eval_data", absolute_eval_data(self.eval_data))
        if self.restart_positions and self.document_mask == "off":
            raise ValueError("--restart-positions counts within documents: leave out --document-mask off")
        several = len(self.data) > 1  # one alone is no weight
        kept = (not text or (several and _is_number(text)) for text in self.data)
        named = (t if keep else str(absolute_path(t)) for t, keep in zip(self.data, kept, strict=True))
        object.__setattr__(self, "data", tuple(named))

    @property
    def eval_paths(self) -> dict[str, str]:
        """The paths of --eval-data by name, the name of the only one perhaps empty; none without the flag."""
        return parse_eval_data(self.eval_data)

    @property
    def tokens_a_step(self) -> int:
        """Tokens a step."""
        return self.batch_size * self.seq_len


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
    """The precision of the GEMMs."""

    policy: Annotated[str | Policy, _POLICY] = "wgrad_hadamard"
    """Policy of the linear layers: a name of mxjax.policies(), FILE.json, or FILE.py:NAME, a variable of a
    file that is run, without what is below if __name__ == "__main__". Or a schedule, where each later policy
    begins at a step or after a share of the run: 'wgrad_hadamard; fp8 from 0.82'.
    Or a recipe of a whole run: 'heal' is 'full_hadamard; fp8 from 0.82', 'primus_deosc' is primus_turbo with
    bf16 in the first and last two blocks and --deoscillate 3:200:1500, 'tetrajet_v2_reset' is tetrajet_v2
    with --deoscillate 8:200:15001:50. docs/policies.md has them all."""
    scale_rule: ScaleRule | None = None
    """Use this rule for the MXFP4 scales of every layer instead of the policy's."""
    layers: tuple[str, ...] = ()
    """Exceptions by layer, as PATTERN=POLICY with a name or file, e.g. 'head=fp8' 'blocks.*.mlp.down=a.json',
    or for the first 2 and last 4 blocks 'blocks[:2].*=bf16' 'blocks[-4:].*=bf16'. They hold in every phase.
    The last match wins."""
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Changes a field of --policy, in every phase, as PATH=VALUE: --set wgrad.rhs.rounding=stochastic --set
    'wgrad.*.scale_rule=even'. See mxjax.set_fields."""
    deoscillate: str | None = None
    """Snap 4-bit weights that oscillate to their quantized value, as RATIO:PERIOD:START: every PERIOD steps
    after step START, those whose quantized value moved at least RATIO times as far as they did. Skipped steps
    do not count. With :WINDOW, distances are added up over the first WINDOW steps of a period alone, and
    weights are snapped after them. It takes two more copies of the parameters. Default: none."""
    implementation: Implementation | None = None
    """Implementation of the GEMMs. Default: the fastest that works here."""

    def __post_init__(self):
        if not isinstance(self.policy, str | Policy):
            raise TypeError(
                f"policy must be an mxjax.Policy or a text, as for --policy, got {self.policy!r:.60}"
            )
        _make_tuples(self, "layers", "set")

    def rules(self) -> list[tuple[str, Policy]]:
        """Returns the exceptions by layer as (pattern, policy)."""
        return parse_rules(self.layers)

    @property
    def label(self) -> str:
        """The policy in records and messages."""
        return label(self.policy)

    @property
    def files(self) -> list[pathlib.Path]:
        """The files that policies come from."""
        texts = [*self.label.split(";"), *(layer.partition("=")[2] for layer in self.layers)]
        found = (re.match(r"\s*(.+?\.json)\b|\s*(.+?\.py):", text) for text in texts)
        return [absolute_path(match[1] or match[2]) for match in found if match]


def parse_rules(layers: Iterable[str]) -> list[tuple[str, Policy]]:
    """Returns exceptions by layer, each PATTERN=POLICY, as (pattern, policy).

    Raises:
      ValueError: malformed text, or see `training.flags.policy_source.load_policy`.
    """
    rules: list[tuple[str, Policy]] = []
    for rule in layers:
        pattern, equals, source = rule.partition("=")
        if not equals:
            raise ValueError(f"--layers takes PATTERN=POLICY, got {rule!r}")
        try:
            rules.append((pattern, load_policy(source)))
        except ValueError as error:
            raise ValueError(f"--layers {rule!r}: {error}") from None
    return rules


@dataclasses.dataclass(frozen=True)
class MLPerfConfig:
    """MLPerf's log of a run, and its entries about the submitter."""

    mllog: bool = False
    """Also write mllog.txt for MLPerf's compliance checker."""
    submission_org: str = "none"
    """Organization that submits the result."""
    submission_platform: str | None = None
    """Name of the platform. Default: the device's name."""
    submission_division: Literal["closed", "open"] = "closed"
    """Division of the submission."""


@dataclasses.dataclass(frozen=True)
class ObserveConfig:
    """Records besides metrics.jsonl; nothing here changes the training."""

    tensorboard: bool = False
    """Also write TensorBoard event files into the run's folder."""
    wandb: bool = False
    """Also log to Weights & Biases, in the project WANDB_PROJECT or mxjax, with files in RUN/wandb. A resumed
    run continues there."""
    stats_every: int | None = None
    """Steps between measurements of the error of each GEMM of each block, on at most 2048 tokens of the
    batch; they go to metrics.jsonl. Default: none."""
    profile: str | None = None
    """Trace the steps FIRST:LAST, inclusive, into the run's folder, for XProf or Perfetto."""

    @property
    def profiled_steps(self) -> range:
        """The steps to trace; empty by default."""
        found = re.fullmatch(r"([1-9]\d*):(\d+)", self.profile or "")
        return range(int(found[1]), int(found[2]) + 1) if found else range(0)


@dataclasses.dataclass(frozen=True)
class Config:
    """A training run."""

    preset: Literal["mlperf-llama3.1-8b"] | None = None
    """Defaults for all other flags: MLPerf Training's llama31_8b at --batch-size sequences a step."""
    precision: Annotated[PrecisionConfig, tyro.conf.arg(name="")] = PrecisionConfig()
    data: Annotated[DataConfig, tyro.conf.arg(name="")] = DataConfig()
    optimizer: Annotated[OptimizerConfig, tyro.conf.arg(name="")] = dataclasses.field(
        default_factory=OptimizerConfig
    )
    mlperf: Annotated[MLPerfConfig, tyro.conf.arg(name="")] = MLPerfConfig()
    observe: Annotated[ObserveConfig, tyro.conf.arg(name="")] = ObserveConfig()
    model: str = "tiny"
    """Name of a model in models/configs.py. Its vocabulary comes from the data, see --vocab-size."""
    model_config: pathlib.Path | None = None
    """Shape of the model instead of --model: a JSON file with the fields of Hugging Face's config.json or of
    DecoderConfig in models/configs.py. Its vocabulary too comes from the data."""
    init: pathlib.Path | None = None
    """Begin with the model and the last weights of this run, or of an imported checkpoint."""
    lora: int | None = None
    """Train low-rank adapters of this rank beside the linear layers of the blocks, and freeze the weights
    that --init brings. Weights that `import --packed` brought stay in packed MXFP4."""
    branch: pathlib.Path | None = None
    """Go on from the state of another run in a new --out, with its flags: RUN, or RUN/checkpoints/STEP. With
    --decay N the learning rate falls over the next N steps, the last ones; --steps makes them more. It must
    have been the same so far, as with --schedule constant and before a decay."""
    mesh: str | None = None
    """Sizes of the mesh axes, as AXIS=SIZE,...: data, expert and fsdp shard the batch, context its
    sequences; fsdp, context and tensor the parameters, and expert those of experts. A missing axis is 1.
    Default: fsdp over all devices."""
    devices: int | None = None
    """Virtual devices to make of a CPU, to try a mesh without GPUs. Default: the devices that there are."""
    distributed: bool = False
    """Train together with other processes that have the same flags and --out. JAX finds the processes of a
    Slurm, Open MPI or Kubernetes job; elsewhere set JAX_COORDINATOR_ADDRESS (HOST:PORT of the first process),
    JAX_NUM_PROCESSES and JAX_PROCESS_ID (from 0)."""
    expert_traffic: Traffic | None = None
    """fp4: pack tokens that travel along the mesh axis expert as MXFP4, 4.25 instead of 16 bits an element,
    with the same results; for policies whose Fprop quantizes them so and whose Wgrad reads these values.
    Default: whole tokens."""
    remat: Remat = "none"
    """Recomputation of a block in the backward pass, to save memory. none: keep everything; dots: keep the
    results of matrix products and attention; fp4: keep packed MXFP4 operands; full: keep only the input."""
    unroll: int | None = None
    """Blocks in one iteration of the compiled loop over layers. More run faster and compile longer. Default:
    all on a GPU, one elsewhere."""
    accumulate: int = 1
    """Parts of a batch that run one after another: less memory, the same gradient."""
    steps: int = 300
    """Length of the run, and of the learning-rate schedule."""
    seed: int = 0
    """Seed of the weights, the order of the data, and the policy's random bits."""
    out: pathlib.Path | None = None
    """Folder of the run. Default: runs/MODEL-POLICY-TIME."""
    resume: bool = False
    """Resume the run in --out from its last good checkpoint with all its flags, on a CPU bit for bit."""
    plan: bool = False
    """Print the memory of a step, which GPUs it fits, whether it fits here, and else what to change; train
    and write nothing. --mesh may have more devices than there are."""
    stop_after: int | None = None
    """Checkpoint and end after this step; --resume continues the run."""
    checkpoint_every: int = 100
    """Steps between checkpoints. The last step always writes one."""
    keep_checkpoints: int = 2
    """Number of newest checkpoints to keep, besides the one with the lowest evaluation loss."""
    eval_every: int = 100
    """Steps between evaluations. The last step is always evaluated."""
    eval_batches: int = 32
    """Batches of an evaluation, from the start of the validation data."""
    eval_sequences: int | None = None
    """Exact number of sequences of an evaluation; replaces --eval-batches."""
    target_loss: float | None = None
    """End the run once the evaluation loss is at most this."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """End the run at a loss, gradient or update that is NaN or infinite, or skip that step; ten skipped steps
    in a row end the run. Either way the evidence is saved."""
    spike_factor: float | None = None
    """Report losses above this multiple of the median of the last 100, also in spikes.jsonl; inf reports
    none. Default: report a loss or gradient norm 6 deviations above its median, if that is 3 % above for the
    loss and twice as much for the norm."""
    log_every: int = 10
    """Steps between printed lines. metrics.jsonl gets every step."""
    policy: dataclasses.InitVar[tyro.conf.Suppress[str | Policy | None]] = None
    """The policy of `precision`, for programs: Config(policy=...)."""

    def __post_init__(self, policy: str | Policy | None):
        if policy is not None:
            object.__setattr__(self, "precision", dataclasses.replace(self.precision, policy=policy))
        for name in ("model_config", "init", "branch", "out"):  # programs may give texts
            if isinstance(path := getattr(self, name), str):
                object.__setattr__(self, name, pathlib.Path(path))
        make_absolute(self)
        check_ranges(by_flag(self), _RANGES)
        parse_eval_data(self.data.eval_data)  # refuses what is malformed
        if not all(self.data.data):
            raise ValueError("--data and --eval-data name files, folders or datasets, got an empty name")
        if self.data.batch_size % self.accumulate:
            raise ValueError(
                f"--accumulate {self.accumulate} must divide --batch-size {self.data.batch_size}"
            )
        if self.stop_after is not None and not 0 < self.stop_after <= self.steps:
            raise ValueError(f"--stop-after must be from 1 to --steps {self.steps}, got {self.stop_after}")
        check_effect(self.optimizer, self.steps)
        self._check_read()
        if self.mlperf.mllog:
            check_logged(self.optimizer)
        traced, profile = self.observe.profiled_steps, self.observe.profile
        if profile is not None and not (traced and traced[-1] <= self.steps):
            raise ValueError(f"--profile takes FIRST:LAST, from 1 to --steps {self.steps}, got {profile!r}")
        if self.model_config is not None and self.model != Config.model:
            raise ValueError("--model and --model-config both name the model: give one of them")
        if self.model_config is not None and self.init is not None:
            raise ValueError("--init brings its own model: leave out --model-config")
        if self.branch is not None and self.init is not None:
            raise ValueError("--branch goes on with all of a run, --init with its weights: give one of them")
        if self.resume and self.out is None:
            raise ValueError("--resume continues the run in --out: name its folder")
        if self.distributed and self.out is None:
            raise ValueError("--distributed needs --out: the folder that all processes share")

    def _check_read(self) -> None:
        """Raises ValueError for a flag that nothing reads beside the others."""
        for name in ("submission_org", "submission_platform", "submission_division"):
            if not self.mlperf.mllog and getattr(self.mlperf, name) != getattr(MLPerfConfig, name):
                flag = f"--{name.replace('_', '-')} {getattr(self.mlperf, name)}"
                raise ValueError(f"{flag} is for MLPerf's log: add --mllog, or leave it out")
        if self.eval_sequences is not None and self.eval_batches != Config.eval_batches:
            raise ValueError(
                f"--eval-sequences {self.eval_sequences} replaces --eval-batches {self.eval_batches}: give "
                "one of them, for batches beside a preset --eval-sequences None"
            )
        if (every := self.observe.stats_every) is not None and every > self.steps:
            raise ValueError(f"--stats-every {every} measures nothing in --steps {self.steps}; lower it")

    @property
    def last_step(self) -> int:
        """The step after which this invocation ends."""
        return self.steps if self.stop_after is None else self.stop_after

    @property
    def model_name(self) -> str:
        """The name of the model in records and messages."""
        return self.model if self.model_config is None else self.model_config.stem

    def folder(self) -> pathlib.Path:
        """Returns the run's folder: `out`, or a new name under runs/."""
        without_folders = re.sub(r"[^\s;]*/", "", self.precision.label)
        policy = re.sub(r"[^\w.]+", "-", without_folders)
        name = f"{self.model_name}-{policy}-{time.strftime('%Y%m%d-%H%M%S')}"
        return self.out or pathlib.Path("runs") / name


ABOUT_THE_RUN = frozenset(
    {"out", "resume", "plan", "stop_after", "checkpoint_every", "keep_checkpoints", "eval_every"}
    | {"log_every", "spike_factor", "mesh", "devices", "distributed"}
    | {field.name for field in dataclasses.fields(ObserveConfig)}
)
"""Flags that say where a run lies, on which devices, how often it reports, and nothing of what it trains."""


def by_flag(config: Any) -> dict[str, Any]:
    """Returns the values of a configuration's fields, and of its concerns' fields, by flag."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        concern = dataclasses.is_dataclass(value) and not isinstance(value, Policy)
        found |= by_flag(value) if concern else {field.name: value}
    return found
