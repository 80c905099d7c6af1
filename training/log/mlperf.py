"""MLPerf's log of a run, for Training's llama31_8b: lines that its compliance checker reads.

The lines are written here and not by mlperf_logging: that adds file and line of the caller to every event,
and needs pandas and scipy. The tests pass the log to its checker.

Source: mlcommons/logging 4.1.68, mllog/mllog.py (the form of a line) and compliance_checker/training_6.1.0
(the keys).
"""

import json
import pathlib
import time
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from models.sharding import batch_parts_of
from mxjax.policy import Policy
from mxjax.policy.layers import LayerPolicies
from training.config import Config
from training.flags import mlperf
from training.log.metrics import LineFile, parse_object, read_lines
from training.plan import Plan

MLLOG = "mllog.txt"
TOKEN = ":::MLLOG "
# MLPerf's names of our formats, lowest precision first.
_PRECISIONS = {
    "mxfp4": "mxfp4",
    "nvfp4": "nvfp4",
    "mxfp6_e2m3": "mxfp6",
    "mxfp6_e3m2": "mxfp6",
    "mxfp8_e4m3": "fp8",
    "mxfp8_e5m2": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "bf16": "bfloat16",
    "fp32": "fp32",
}
_ENDS = {"epoch_stop", "run_stop", "train_samples"}
_EVALUATION = {"block_stop", "eval_start", "eval_accuracy"}  # before eval_stop


class MLPerfLog:
    """Appends to MLPerf's log of a run; without a path it does nothing. A context manager.

    Positions in the run are counted in sequences trained on.
    """

    def __init__(self, path: pathlib.Path | None, settings: Mapping[str, Any], start: int, since: float):
        """Opens the log; logs the start of a new run, or continues the log of a resumed one.

        Args:
          path: the file, or None for no log.
          settings: from `settings`; written once.
          start: sequences trained on so far; later events in the file are dropped.
          since: the time, in seconds since 1970, at which initialization began.
        """
        self._file = None
        if path is None:
            return
        lines = _lines_until(path, start)
        self._file = LineFile(path, lines)
        if lines:
            return
        # A submitter clears the system's caches and logs it; this program does not.
        self._event("cache_clear", False, time_s=since)
        self._event("init_start", kind="INTERVAL_START", time_s=since)
        for key, value in settings.items():
            self._event(key, value)
        self._event("init_stop", kind="INTERVAL_END")
        self._event("run_start", kind="INTERVAL_START")
        self._event("epoch_start", kind="INTERVAL_START", at=start)
        self._event("block_start", kind="INTERVAL_START", at=start)

    def __enter__(self) -> "MLPerfLog":
        return self

    def __exit__(self, *exception) -> None:
        if self._file is not None:
            self._file.close()

    def evaluation_starts(self, sequences: int) -> None:
        """Logs that training pauses for an evaluation."""
        self._event("block_stop", kind="INTERVAL_END", at=sequences)
        self._event("eval_start", kind="INTERVAL_START", at=sequences)

    def evaluation_ends(self, sequences: int, loss: float, last: bool) -> None:
        """Logs the evaluation's loss, and that training continues unless it was the last."""
        self._event("eval_accuracy", loss, at=sequences)
        self._event("eval_stop", kind="INTERVAL_END", at=sequences)
        if not last:
            self._event("block_start", kind="INTERVAL_START", at=sequences)

    def run_ends(self, sequences: int, success: bool) -> None:
        """Logs the end of the run, and whether it reached its target."""
        self._event("epoch_stop", kind="INTERVAL_END", at=sequences)
        self._event("run_stop", kind="INTERVAL_END", at=sequences, status="success" if success else "aborted")
        self._event("train_samples", sequences)

    def _event(
        self,
        key: str,
        value: Any = None,
        *,
        kind: str = "POINT_IN_TIME",
        at: int | None = None,
        time_s: float | None = None,
        **metadata: Any,
    ) -> None:
        if self._file is None:
            return
        event = {
            "namespace": "",
            "time_ms": int(1000 * (time.time() if time_s is None else time_s)),
            "event_type": kind,
            "key": key,
            "value": value,
            "metadata": metadata if at is None else {"samples_count": at, **metadata},
        }
        self._file.write(TOKEN + json.dumps(event))


def settings_of(plan: Plan) -> dict[str, Any]:
    """Returns the settings at the head of a run's log; empty without --mllog."""
    if not plan.config.mlperf.mllog:
        return {}
    sequences = sum(len(batch) for batch in plan.held_out[0].batches)
    layers = [layer for phase in plan.phases for layer in phase.layers.items()]
    policies = LayerPolicies(*zip(*layers, strict=True))  # of all phases, for their lowest precision
    return settings(plan.config, policies, sequences, jax.devices()[0].device_kind, plan.mesh.shape)


def settings(
    config: Config, policies: LayerPolicies, eval_sequences: int, device: str, mesh: Mapping[str, int]
) -> dict[str, Any]:
    """Returns the settings at the head of the log, in the order that the checker wants.

    Args:
      device: name of the platform, unless the configuration gives one.
      mesh: the size of each mesh axis; data and fsdp are data parallelism.
    Raises:
      ValueError: MLPerf has no name for a format that a layer uses.
    """
    attention, linear = [], []
    for name, policy in policies.items():
        (attention if name.endswith(("attention.scores", "attention.values")) else linear).append(policy)
    optimizer, data = config.optimizer, config.data
    return {
        "submission_benchmark": mlperf.BENCHMARK,
        "submission_org": config.mlperf.submission_org,
        "submission_division": config.mlperf.submission_division,
        "submission_platform": config.mlperf.submission_platform or device,
        "lowest_numerical_precision_in_linear": _lowest_precision(linear),
        "lowest_numerical_precision_in_attn": _lowest_precision(attention),
        "lowest_numerical_precision_in_comm": "fp32",  # gradients are summed in float32
        "tensor_parallelism": mesh["tensor"],
        "pipeline_parallelism": 1,
        "context_parallelism": mesh["context"],
        "expert_parallelism": 1,
        "micro_batch_size": data.batch_size // (config.accumulate * batch_parts_of(mesh)),
        "gradient_accumulation_steps": config.accumulate,
        "config_filename": "config.json",
        "seed": config.seed,
        "global_batch_size": data.batch_size,
        "max_sequence_length": data.seq_len,
        "max_steps": config.steps,
        "eval_samples": eval_sequences,
        "opt_name": "adamw",
        "opt_base_learning_rate": optimizer.lr,
        "opt_end_learning_rate": optimizer.lr * optimizer.min_lr_ratio,
        "opt_learning_rate_warmup_steps": optimizer.warmup_steps,
        "opt_learning_rate_decay_steps": config.steps - optimizer.warmup_steps,
        "opt_learning_rate_decay_schedule": "cosine with linear warmup",
        "opt_adamw_beta_1": optimizer.b1,
        "opt_adamw_beta_2": optimizer.b2,
        "opt_adamw_epsilon": optimizer.eps,
        "opt_adamw_weight_decay": optimizer.weight_decay,
        "opt_gradient_clip_norm": optimizer.clip,
    }


def _lowest_precision(policies: Iterable[Policy]) -> str:
    """Returns MLPerf's name of the lowest precision among the operands of these policies."""
    gemms = (gemm for policy in policies for gemm in (policy.fprop, policy.dgrad, policy.wgrad))
    formats = {operand.format for gemm in gemms for operand in (gemm.lhs, gemm.rhs)}
    if unknown := formats - _PRECISIONS.keys():
        raise ValueError(f"--mllog: MLPerf has no name for {', '.join(sorted(unknown))}; leave the log out")
    return next(name for ours, name in _PRECISIONS.items() if ours in formats)


def parse_event(line: bytes) -> dict[str, Any]:
    """Returns the event on a line; raises ValueError if the line is damaged."""
    if not line.startswith(TOKEN.encode()):
        raise ValueError("it is no event")
    event = parse_object(line.removeprefix(TOKEN.encode()))
    metadata = event.get("metadata")
    if not isinstance(event.get("key"), str) or not isinstance(metadata, dict):
        raise ValueError("an event needs key and metadata")
    if type(metadata.get("samples_count", 0)) is not int:
        raise ValueError("samples_count is no integer")
    return event


def _lines_until(path: pathlib.Path, sequences: int) -> list[bytes]:
    """Returns the lines of a log up to `sequences`; none if the run had not begun."""
    events = read_lines(path, parse_event)
    if not any(event["key"] == "block_start" for _, event in events):
        return []
    kept = [
        (line, event["key"])
        for line, event in events
        if event["key"] not in _ENDS and event["metadata"].get("samples_count", 0) <= sequences
    ]
    while kept and kept[-1][1] in _EVALUATION:  # interrupted, and repeated on resume
        kept.pop()
    return [line for line, _ in kept]
