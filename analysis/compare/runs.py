"""Runs to compare: their losses by tokens, short names, and groups that differ in the seed alone."""

import collections
import dataclasses
import itertools
import json
import math
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from analysis.runs import RecordedRun, read
from training.config import ABOUT_THE_RUN, Config, MLPerfConfig
from training.log.metrics import METRICS
from training.run.record import to_json

Losses = Mapping[int, float]
"""Losses by tokens, or by sequences, trained on."""

_NOT_COMPARED = ABOUT_THE_RUN | {field.name for field in dataclasses.fields(MLPerfConfig)}
_NOT_COMPARED |= {"seed", "branch", "remat", "unroll", "accumulate"}
"""Flags that say where, how often or with which seed, not what is trained."""


class Group(NamedTuple):
    """Runs that differ in the seed alone."""

    name: str
    runs: tuple[RecordedRun, ...]

    def curve(self, part: str) -> dict[int, float]:
        """Returns the mean over the runs of "validation" or "train" losses, where all runs have one."""
        curves: list[Losses] = [getattr(run, part) for run in self.runs]
        common = set(curves[0]).intersection(*curves)
        return {x: math.fsum(curve[x] for curve in curves) / len(curves) for x in sorted(common)}


def read_runs(folders: Sequence[pathlib.Path], sequences: bool) -> list[RecordedRun]:
    """Reads runs.

    Args:
      sequences: count the sequences trained on instead of the tokens.
    Raises:
      ValueError: a folder holds no run, or a run has not been evaluated.
    """
    runs = read(folders, sequences)
    for run in runs:
        folder, config = run.folder, run.config
        if run.last_step > config.steps:
            raise ValueError(
                f"{folder / METRICS} has step {run.last_step}, and the run has --steps {config.steps}: "
                f"python train.py --resume --out {shlex.quote(str(folder))} removes what no checkpoint has"
            )
        if not run.validation and not (folder / METRICS).exists():
            raise ValueError(f"{folder} has no {METRICS}: its metrics are lost")
        if not run.validation:
            raise ValueError(
                f"{folder} has no evaluation to compare; wait for its first one, continue it with "
                f"python train.py --resume --out {shlex.quote(str(folder))}, or leave it out"
            )
    return runs


def _resolved(run: RecordedRun) -> str:
    """Returns the model, the layers' policies, the mask of documents and the identity of the data on record.

    The configuration only names them; the same data may lie elsewhere.
    """
    facts = {**run.saved.get("data", {}), "source": None}
    names = ("model", "phases", "policies", "documents")
    return json.dumps([*(run.saved.get(name) for name in names), facts], sort_keys=True)


def group_by_configuration(runs: Sequence[RecordedRun]) -> list[Group]:
    """Returns the runs grouped by everything but the seed; equal seeds stay groups of their own."""
    found: dict[tuple, list[RecordedRun]] = {}
    for run in runs:
        found.setdefault((_resolved(run), *_settings(run.config).items()), []).append(run)
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
    one, other = ((_resolved(g.runs[0]), _settings(g.runs[0].config) | {"steps": ""}) for g in (a, b))
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


def _label(members: Sequence[RecordedRun], everything: Sequence[RecordedRun]) -> str:
    """Returns the values in which a group differs from the others, else what its names begin with."""
    if text := _differing(members[0], everything):
        return text
    names = [run.name for run in members]
    shared = "".join(a[0] for a in itertools.takewhile(lambda a: len(set(a)) == 1, zip(*names, strict=False)))
    return shared.rstrip("-_. ") or names[0]


def _differing(run: RecordedRun, runs: Sequence[RecordedRun]) -> str:
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
    `_resolved` tells whether they are the same.
    """
    values = to_json(config)
    data, of_data = values["data"], ("data", "eval_data")
    values["data"] = data | {name: _without_folders(data[name]) for name in of_data}
    values["model_config"] = _without_folders(values["model_config"])
    flat: dict[str, Any] = {}
    for name, value in values.items():
        parts = {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
        flat |= {k: str(v) for k, v in parts.items() if k.rpartition(".")[2] not in _NOT_COMPARED}
    return flat
