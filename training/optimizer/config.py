"""The configuration of the optimizer and its learning rate; see `training.config`."""

import dataclasses
import types
from collections.abc import Mapping
from typing import Literal

from training.flags.ranges import COUNT, DECAY, NOT_NEGATIVE, POSITIVE, POSITIVE_OR_INF, Range

RANGES: Mapping[str, Range] = types.MappingProxyType(
    {
        "lr": POSITIVE,
        "warmup_steps": Range("at least 0 and less than 2**31 - 1", lambda n: 0 <= n < 2**31 - 1),
        "decay": COUNT,
        "min_lr_ratio": Range("from 0 to 1", lambda x: 0 <= x <= 1),
        "b1": DECAY,
        "b2": DECAY,
        "eps": NOT_NEGATIVE,
        "momentum": DECAY,
        "consistent_rms": POSITIVE,
        "adam_lr": POSITIVE,
        "weight_decay": NOT_NEGATIVE,
        "z_loss": Range("0, or a positive float32 up to 1", lambda x: NOT_NEGATIVE.contains(x) and x <= 1),
        "ema": DECAY,
        "clip": POSITIVE_OR_INF,
    }
)


_BYTES = {"float32": 4, "bfloat16": 2}


class DefaultRate(float):
    """A learning rate that nobody chose; the same number as a flag or argument is a plain float."""


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer; by default AdamW as in MLPerf Training's llama31_8b, with its warm-up and cosine."""

    lr: float = DefaultRate(4e-3)
    """Peak learning rate. The default is for training from scratch: imported weights need --lr."""
    warmup_steps: int = 30
    """Steps of linear warm-up."""
    optimizer: Literal["adamw", "muon", "sgd"] = "adamw"
    """adamw; muon, which orthogonalizes the momentum of each matrix of the blocks, also query, key, value,
    gate, up and every expert's apart, and leaves other parameters to AdamW; or sgd, with momentum."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Learning rate after the warm-up. cosine: half a cosine over the rest of the run; wsd: stable, then a
    decay over the last --decay steps; constant."""
    decay: int | None = None
    """Steps of cosine's or wsd's decay. cosine: from the warm-up on, by default to the end of the run; later
    ones have its lowest rate. wsd: the last steps, after the warm-up, by default a fifth of the run."""
    decay_shape: Literal["linear", "1-sqrt"] = "linear"
    """Shape of wsd's decay: a line, or 1 minus the square root of the share that is over."""
    min_lr_ratio: float = 0.1
    """Final learning rate as a fraction of the peak, unless it is constant."""
    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-5
    """Added to the root of the second moment."""
    momentum: float = 0.95
    """Momentum of muon (Nesterov's) and sgd."""
    consistent_rms: float | None = 0.2
    """Root mean square of muon's updates before the learning rate, whatever a matrix's shape; 0.2 is AdamW's,
    so that both take one --lr. None: the root of d_out / d_in times as large where that exceeds 1."""
    adam_lr: float | None = None
    """Peak learning rate of the parameters that muon leaves to AdamW. Default: --lr."""
    weight_decay: float = 0.1
    """Decoupled weight decay; norms have none."""
    no_decay: tuple[str, ...] = ()
    """Patterns of other parameters without weight decay, e.g. embedding head 'blocks.*.attention.*'."""
    z_loss: float = 0.0
    """Coefficient of the z-loss, the mean squared logsumexp of the logits, which the training loss adds;
    1e-4 in PaLM. Losses on record leave it out."""
    ema: float | None = None
    """Average the parameters over the steps, each weighing this much less than the next, in float32;
    evaluations have the average's loss too, and eval.py and exports take it by --weights ema."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Type of the optimizer's moments. bfloat16 halves them; they are rounded stochastically."""
    master: Literal["float32", "bfloat16"] = "float32"
    """Type of the parameters between steps. bfloat16 halves them; each update is computed in float32 and the
    result rounded stochastically."""
    clip: float = 1.0
    """Clip gradients to this global norm; inf does not clip."""

    def __post_init__(self):
        if isinstance(self.no_decay, str):
            raise TypeError(f"no_decay must be a tuple of texts, got {self.no_decay!r:.60}")
        object.__setattr__(self, "no_decay", tuple(self.no_decay))  # a record has a list


def bytes_a_parameter(config: OptimizerConfig) -> int:
    """Returns the least memory of a parameter with its moments."""
    moments = 2 if config.optimizer == "adamw" else 1
    average = 0 if config.ema is None else 4
    return _BYTES[config.master] + moments * _BYTES[config.moments] + average


_LOGGED = ("lr", "warmup_steps", "min_lr_ratio", "b1", "b2", "eps", "weight_decay", "clip")


def check_logged(config: OptimizerConfig) -> None:
    """Raises ValueError if MLPerf's log has no name for a value that is not the default."""
    fields = (field.name for field in dataclasses.fields(config) if field.name not in _LOGGED)
    if others := [name for name in fields if getattr(config, name) != getattr(OptimizerConfig, name)]:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in others)
        raise ValueError(f"--mllog: MLPerf's log has no name for {flags}; leave that out, or add --no-mllog")


_READERS: Mapping[tuple[str, str], tuple[str, ...]] = types.MappingProxyType(
    {
        ("optimizer", "adamw or muon"): ("b1", "b2", "eps"),  # muon leaves some parameters to AdamW
        ("optimizer", "muon or sgd"): ("momentum",),
        ("optimizer", "muon"): ("consistent_rms", "adam_lr"),
        ("schedule", "cosine or wsd"): ("decay", "min_lr_ratio"),
        ("schedule", "wsd"): ("decay_shape",),
    }
)
"""The flags that only some values of another one read."""


def check_effect(config: OptimizerConfig, steps: int) -> None:
    """Raises ValueError if a flag has no effect, or the decay no room in a run of so many steps."""
    for (of, readers), names in _READERS.items():
        for name in names:
            value, default = getattr(config, name), getattr(OptimizerConfig, name)
            if value != default and (chosen := getattr(config, of)) not in readers.split(" or "):
                remedy = "leave it out" if default is None else f"leave it at {default}"
                flag = f"--{name.replace('_', '-')} {value}"
                raise ValueError(f"{flag} is for --{of} {readers}, and not for {chosen}; {remedy}")
    if config.no_decay and not config.weight_decay:
        raise ValueError("--no-decay leaves parameters out of --weight-decay, which is 0; leave it out")
    decay = decay_steps(config, steps)
    if config.schedule == "cosine" and not config.min_lr_ratio and config.warmup_steps + decay < steps:
        ends = config.warmup_steps + decay
        raise ValueError(
            f"--min-lr-ratio 0: the cosine ends at step {ends}, and the rate of the others up to --steps "
            f"{steps} would be 0; take that many steps, or go on from an earlier checkpoint with --branch"
        )
    if config.schedule != "wsd":
        return
    if (least := config.warmup_steps + decay) > steps:
        fifth = f"--schedule wsd: a decay of {decay} steps, a fifth of the run,"
        is_default = config.decay is None
        own, remedy = (fifth, "--warmup-steps") if is_default else (f"--decay {decay}", "one of them")
        raise ValueError(
            f"{own} and --warmup-steps {config.warmup_steps} take {least} steps, more than --steps {steps}; "
            f"lower {remedy}"
        )


def decay_steps(config: OptimizerConfig, steps: int) -> int:
    """Returns the length of cosine's or wsd's decay in a run of so many steps."""
    rest = steps - config.warmup_steps if config.schedule == "cosine" else steps // 5
    return config.decay or max(rest, 1)
