"""Runs to compare: their losses by tokens, short names, and groups that differ in the seed alone."""

import collections
import itertools
import json
import math
import pathlib
import shlex
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from analysis.records import Record, Sqnr, evaluations_by_set, series, sqnr_by_step
from analysis.statistics import has_diverged
from training.config import Config
from training.log.metrics import METRICS, read_records
from training.log.spikes import Spike, find_spikes
from training.run.record import from_json, read_run_config, to_json

Losses = Mapping[int, float]
"""Losses by tokens, or by sequences, trained on."""

LAST = 0.05
"""Share of a run whose training losses are averaged."""

_ELSEWHERE = {"seed", "out", "resume", "stop_after", "distributed", "mesh", "devices", "remat", "unroll"}
_ELSEWHERE |= {"accumulate", "log_every", "checkpoint_every", "keep_checkpoints", "eval_every"}
_ELSEWHERE |= {"spike_factor", "branch", "observe", "mlperf"}
"""Fields of a configuration that say where, how often or with which seed, not what is trained."""


class ComparedRun(NamedTuple):
    """One run.

    Attributes:
      name: as few of the folder's last parts as tell the runs apart.
      validation: loss of each evaluation.
      train: loss of each step.
      resolved: the model, the layers' policies, the mask of documents and the identity of the data on record,
        which the configuration only names.
      held_out: the identity of what the run is evaluated on.
      end: tokens, or sequences, of the whole run.
      grad_norms: gradient norm of each step.
      spikes: the steps that stand out.
      sqnr: decibels by layer and GEMM of each measurement of --stats-every.
      eval_sets: the evaluations of each set, by name.
    """

    name: str
    config: Config
    validation: Losses
    train: Losses
    resolved: str = ""
    held_out: str = ""
    end: int = 0
    grad_norms: Losses = types.MappingProxyType({})
    spikes: Sequence[Spike] = ()
    sqnr: Mapping[int, Sqnr] = types.MappingProxyType({})
    eval_sets: Mapping[str, Mapping[int, Record]] = types.MappingProxyType({})

    @property
    def has_ended(self) -> bool:
        """Whether the run has been evaluated at its end."""
        return max(self.validation) >= self.end

    @property
    def diverged(self) -> bool:
        """Whether the run has diverged (see `analysis.statistics.DIVERGED`), and not overfitted."""
        return self._ends_high and not self.overfitted

    @property
    def overfitted(self) -> bool:
        """Whether evaluations, all finite, end as of a run that has diverged, but training below them all."""
        finite = all(map(math.isfinite, self.validation.values()))
        return finite and self._ends_high and self.last_train_loss() < min(self.validation.values())

    @property
    def _ends_high(self) -> bool:
        points = sorted(self.validation.items())
        return has_diverged(points[-1][1], points)

    def last_train_loss(self, at: int | None = None) -> float:
        """Returns the mean training loss of the last LAST of the steps up to `at`; NaN without any."""
        steps = [loss for x, loss in sorted(self.train.items()) if at is None or x <= at]
        return math.fsum(last) / len(last) if (last := last_of(steps)) else math.nan


def last_of(values: Sequence[float]) -> Sequence[float]:
    """Returns the last LAST of the values, at least one if there are any."""
    return values[-max(1, round(LAST * len(values))) :]


class Group(NamedTuple):
    """Runs that differ in the seed alone."""

    name: str
    runs: tuple[ComparedRun, ...]

    def curve(self, part: str) -> dict[int, float]:
        """Returns the mean over the runs of "validation" or "train" losses, where all runs have one."""
        curves: list[Losses] = [getattr(run, part) for run in self.runs]
        common = set(curves[0]).intersection(*curves)
        return {x: math.fsum(curve[x] for curve in curves) / len(curves) for x in sorted(common)}


def read_runs(folders: Sequence[pathlib.Path], sequences: bool) -> list[ComparedRun]:
    """Reads runs.

    Args:
      folders: the runs' folders.
      sequences: count the sequences trained on instead of the tokens.
    Raises:
      ValueError: a folder holds no run, or a run has not been evaluated.
    """
    runs = []
    for folder, name in zip(folders, short_names(folders), strict=True):
        saved = read_run_config(folder)
        config = from_json(saved["config"])
        facts = saved.get("data", {}) | {"source": None}  # the same data may lie elsewhere
        names = ("model", "phases", "policies", "documents")
        resolved = json.dumps([*(saved.get(name) for name in names), facts], sort_keys=True)
        step = config.data.batch_size if sequences else config.data.tokens_a_step
        records = read_records(folder)
        validation = {r["step"] * step: r["eval_loss"] for r in records if "eval_loss" in r}
        if (beyond := max((r["step"] for r in records), default=0)) > config.steps:
            raise ValueError(
                f"{folder / METRICS} has step {beyond}, and the run has --steps {config.steps}: "
                f"python train.py --resume --out {shlex.quote(str(folder))} removes what no checkpoint has"
            )
        if not validation and not (folder / METRICS).exists():
            raise ValueError(f"{folder} has no {METRICS}: its metrics are lost")
        if not validation:
            raise ValueError(
                f"{folder} has no evaluation to compare; wait for its first one, continue it with "
                f"python train.py --resume --out {shlex.quote(str(folder))}, or leave it out"
            )
        train = {r["step"] * step: r["loss"] for r in records if "loss" in r}
        held_out = held_out_of(config, facts)
        end = config.steps * step
        losses = name, config, validation, train, resolved, held_out, end
        runs.append(
            ComparedRun(
                *losses,
                {n * step: norm for n, norm in series(records, "grad_norm").items()},
                find_spikes(records),
                {n * step: sqnr for n, sqnr in sqnr_by_step(records).items()},
                evaluations_by_set(records),
            )
        )
    return runs


def held_out_of(config: Config, facts: Mapping[str, Any]) -> str:
    """Returns the identity of what a run is evaluated on: of its first set, wherever it lies.

    Args:
      config: the run's configuration.
      facts: the identity of its data on record.
    """
    facts = {**facts, "source": None}
    evaluated = config.eval_sequences or config.eval_batches * config.data.batch_size
    if config.data.eval_data:  # then training data may differ
        name_of_data = pathlib.Path(next(iter(config.data.eval_paths.values()))).name
        facts = {"source": name_of_data, "tokens": facts.get("validation_tokens")}
    return json.dumps([facts, config.data.seq_len, evaluated], sort_keys=True)


def short_names(folders: Sequence[pathlib.Path]) -> list[str]:
    """Returns as many of the last parts of the folders' paths as tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-count:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError("a run is named twice")


def group_by_configuration(runs: Sequence[ComparedRun]) -> list[Group]:
    """Returns the runs grouped by everything but the seed; equal seeds stay groups of their own."""
    found: dict[tuple, list[ComparedRun]] = {}
    for run in runs:
        found.setdefault((run.resolved, *_settings(run.config).items()), []).append(run)
    groups = []
    for members in found.values():
        if len({run.config.seed for run in members}) < len(members):
            groups += [Group(run.name, (run,)) for run in members]
        elif len(members) == 1:
            groups.append(Group(members[0].name, tuple(members)))
        else:
            groups.append(Group(_label(members, runs), tuple(members)))
    return _with_unique_names(groups)


def same_but_for_length(a: Group, b: Group) -> bool:
    """Whether the runs of two groups differ in their length alone."""
    one, other = ((g.runs[0].resolved, _settings(g.runs[0].config) | {"steps": ""}) for g in (a, b))
    return a.runs[0].config.steps != b.runs[0].config.steps and one == other


def differing_settings(groups: Sequence[Group]) -> dict[str, str]:
    """Returns the values of the settings in which groups differ, of groups whose name does not say them."""
    runs = [group.runs[0] for group in groups]
    texts = {group.name: _differing(run, runs) for group, run in zip(groups, runs, strict=True)}
    return {name: text for name, text in texts.items() if text and not name.startswith(text)}


def _with_unique_names(groups: Sequence[Group]) -> list[Group]:
    """Returns the groups; of those with one name each also names its first run."""
    count = collections.Counter(group.name for group in groups)
    return [
        group._replace(name=f"{group.name} ({group.runs[0].name})") if count[group.name] > 1 else group
        for group in groups
    ]


def _label(members: Sequence[ComparedRun], everything: Sequence[ComparedRun]) -> str:
    """Returns the values in which a group differs from the others, else what its names begin with."""
    if text := _differing(members[0], everything):
        return text
    names = [run.name for run in members]
    shared = "".join(a[0] for a in itertools.takewhile(lambda a: len(set(a)) == 1, zip(*names, strict=False)))
    return shared.rstrip("-_. ") or names[0]


def _differing(run: ComparedRun, runs: Sequence[ComparedRun]) -> str:
    """Returns a run's values, but None, of the settings in which runs differ; policies are names alone."""
    own, others = _settings(run.config), [_settings(other.config) for other in runs]
    varying = [k for k in own if own[k] != "None" and len({str(other.get(k)) for other in others}) > 1]
    label = run.config.precision.label
    return " ".join(label if k == "precision.policy" else f"{k.split('.')[-1]}={own[k]}" for k in varying)


def _without_folders(path: Any) -> Any:
    """Returns the last part of a path or of each in a list; None stays."""
    if isinstance(path, list):
        return [_without_folders(part) for part in path]
    return path and pathlib.Path(path).name


def _settings(config: Config) -> dict[str, Any]:
    """Returns the fields that say what is trained, as flat names and strings or numbers.

    Data and a model's file are named without their folders: they may lie elsewhere for each run, and
    `ComparedRun.resolved` tells whether they are the same.
    """
    values = to_json(config)
    data, of_data = values["data"], ("data", "eval_data")
    values["data"] = data | {name: _without_folders(data[name]) for name in of_data}
    values["model_config"] = _without_folders(values["model_config"])
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if name in _ELSEWHERE:
            continue
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": str(part) for key, part in value.items()}
        else:
            flat[name] = str(value)
    return flat
