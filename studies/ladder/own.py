"""A study of one's own: a file of cells, trained beside fp8, and their table.

The file is a JSON object:

    {"protocol": {"like": "tuned-60m", "steps": 700, "lr": 3e-3},
     "cells": ["wgrad.floor", "wgrad_hadamard.floor", "own.json", "recipes.py:mine",
               {"name": "healed", "policy": "own.json; fp8 from 0.82", "layers": ["head=fp8"]}]}

A cell is a policy of the ladder, with its scale rules after a dot; a policy's file, as `train.py --policy`
takes it, relative to this file; or an object with a name and what `train.py` takes as --policy, --layers and
--deoscillate. The protocol is the name of one in `studies.ladder.cells`, or an object of `Protocol`'s fields
that replace those of the one that it is like. "model" names one of models/configs.py (60m), and "lengths" the
further fp8 runs, relative to a cell's, by which a loss is counted in tokens. fp8 is in every study.
"""

import dataclasses
import functools
import os
import pathlib
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.statistics import effective_multiple
from models import decoder
from models.configs import CONFIGS
from models.received import read_object
from mxjax.numerics.scales import ScaleRule
from mxjax.recipes import policies
from mxjax.recipes.whole_runs import RECIPES, RunRecipe
from mxjax.runtime.tables import table
from studies.ladder.cells import (
    BASELINE,
    PROTOCOLS,
    Cell,
    Protocol,
    model_of,
    own_parts,
    policy_of,
    protocol_of,
)
from studies.ladder.results import CellResult, baseline, by_group, gather, read_record
from studies.ladder.tables import beside
from studies.ladder.token_tables import is_constant, lengths_of, overhead_with_interval, reached_later
from studies.ladder.train import run_path
from studies.ladder.whole_runs import check_protocol, is_whole_run
from training.config import PrecisionConfig
from training.optimizer.delayed import check_delayed
from training.optimizer.optimizers import check_optimizer
from training.phases import phases_of

SEEDS = 4
"""Seeds of each cell, unless --seeds says otherwise."""
LENGTHS = (0.65, 0.8, 0.9, 1.1)
"""Lengths of further fp8 runs: where the cost of MXFP4 and the gain of a good recipe lie."""
_FIELDS = {"protocol": str | dict, "cells": list, "model": str, "lengths": list}
_CELL = {"name": str, "policy": str, "layers": list, "deoscillate": str | None}
_JSON_TYPES = {str: "a text", list: "a list", str | dict: "a text or an object", str | None: "a text"}
_RULES = "|".join(typing.get_args(ScaleRule))
_WITH_RULES = re.compile(rf"(\w+)\.((?:{_RULES})(?:-(?:{_RULES})){{0,2}})")
_FILE = re.compile(r"[^\s;=]+\.(?:json|py:\w+)(?=$|[\s;])")


def read_study(path: pathlib.Path, model_config: pathlib.Path | None = None) -> tuple[Cell, ...]:
    """Returns the cells of a file, fp8 and its further lengths among them.

    Args:
      model_config: the shape of another model than the study's, see `with_model`.
    Raises:
      ValueError: the file is no study, or a policy, model or protocol in it is none; the message names it.
    """
    raw = read_object(path)
    try:
        _check_fields(raw, _FIELDS, "a study")
        name, training = _protocol(raw.get("protocol", "tuned-60m"), path.stem)
        model, texts = raw.get("model", "60m"), raw.get("cells")
        if not texts:
            raise ValueError(
                '"cells" is a list of policies, their files, or objects with a name and a policy'
            )
        first = Cell(BASELINE, "", model, name, SEEDS, training=training)
        if model_config is not None:
            first = with_model(first, model_config)
        cells = [first, *(_cell(each, first, path.parent) for each in texts if each != BASELINE)]
        names = [cell.name for cell in cells]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two cells are called {repeated[0]}: give one another name")
        cells += _lengths(raw.get("lengths", list(LENGTHS)), first)
        for cell in cells:
            _check(cell)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return tuple(cells)


def _check_fields(raw: Mapping[str, Any], types: Mapping[str, Any], what: str) -> None:
    """Raises ValueError for a field that is unknown, or of another type than these."""
    if unknown := sorted(set(raw) - set(types)):
        raise ValueError(
            f"{what} has no field {', '.join(unknown)}; its fields are {', '.join(sorted(types))}"
        )
    for name, value in raw.items():
        if not isinstance(value, types[name]):
            kind = _JSON_TYPES[types[name]]
            raise ValueError(f"{name} of {what} must be {kind}, got {value!r:.80}")


def _protocol(raw: Any, stem: str) -> tuple[str, Protocol | None]:
    """Returns a protocol's name, and the protocol itself unless it is one of the ladder's."""
    names = f"the protocols are {', '.join(PROTOCOLS)}"
    if isinstance(raw, str):
        if raw not in PROTOCOLS:
            raise ValueError(f"unknown protocol {raw!r}; {names}")
        return raw, None
    fields = {field.name: field for field in dataclasses.fields(Protocol)}
    _check_fields(raw, {"like": str, **dict.fromkeys(fields, object)}, "a protocol")
    if raw.get("like", "tuned-60m") not in PROTOCOLS:
        raise ValueError(f'"protocol" is a name or an object whose "like" is one; {names}')
    if stem in PROTOCOLS or not re.fullmatch(r"[\w-]+", stem):
        raise ValueError(
            f"name the file otherwise, by letters, digits and -: {stem!r} is no new protocol's name"
        )
    changes = {name: value for name, value in raw.items() if name != "like"}
    for name, value in changes.items():
        if not _is_valid(name, value):
            raise ValueError(f"protocol: {name} cannot be {value!r}; its type is {fields[name].type}")
    protocol = dataclasses.replace(PROTOCOLS[raw.get("like", "tuned-60m")], **changes)
    if protocol.evaluations > protocol.steps or protocol.warmup >= protocol.steps:
        raise ValueError(
            f"protocol: {protocol.evaluations} evaluations and a warm-up of {protocol.warmup} steps do "
            f"not fit in {protocol.steps} steps"
        )
    return stem, protocol


def _is_valid(name: str, value: Any) -> bool:
    """Whether a value of JSON may be that of a protocol's field."""
    hint = typing.get_type_hints(Protocol)[name]
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    if name == "bfloat16_gradients" or (name == "horizon" and value is None):
        return isinstance(value, bool | None)
    number_type = int | float if name in ("lr", "eps") else int
    least = 0 if name in ("warmup", "outlier_channels") else 1 if number_type is int else 1e-30
    return isinstance(value, number_type) and not isinstance(value, bool) and least <= value < 2**31


def _cell(raw: Any, like: Cell, folder: pathlib.Path) -> Cell:
    if isinstance(raw, str) and (found := _WITH_RULES.fullmatch(raw)):
        return dataclasses.replace(like, policy=found[1], rules=found[2])
    if isinstance(raw, str):
        is_file = raw.endswith(".json") or ".py:" in raw
        if not is_file:
            return dataclasses.replace(like, policy=raw)
        raw = {"name": re.sub(r".*:|\.json$", "", os.path.basename(raw)), "policy": raw}
    if not isinstance(raw, dict) or not {"name", "policy"} <= raw.keys():
        raise ValueError(f"a cell is a policy or an object with a name and a policy, got {raw!r:.80}")
    _check_fields(raw, _CELL, "a cell")
    name, layers = raw["name"], raw.get("layers", [])
    if not re.fullmatch(r"[\w+-]{1,99}", name) or name in {*policies(), *RECIPES}:
        raise ValueError(
            f"{name!r} cannot name a recipe of your own: take at most 99 letters, digits "
            "and -, and no policy's name"
        )
    if not all(isinstance(rule, str) for rule in layers):
        raise ValueError(f"{name}: layers is a list of texts, as for --layers")
    located = [_located(text, folder) for text in (raw["policy"], *layers)]
    recipe = RunRecipe(located[0], tuple(located[1:]), raw.get("deoscillate"))
    return dataclasses.replace(like, policy=name, recipe=recipe)


def _located(text: str, folder: pathlib.Path) -> str:
    """Returns a policy, a schedule or an exception by layer with the paths of files in it."""
    return _FILE.sub(lambda found: str(folder.absolute() / os.path.expanduser(found[0])), text)


def _lengths(raw: Sequence[Any], first: Cell) -> list[Cell]:
    """Returns the further fp8 runs; none if the rate is all but constant, where P1 needs none."""
    protocol = protocol_of(first)
    numbers = [m for m in raw if isinstance(m, int | float) and not isinstance(m, bool)]
    fits = all(m > 0 and m != 1 and 1 <= m * protocol.steps < 2**31 for m in numbers)
    if len(numbers) < len(raw) or not fits or len({f"{m:g}" for m in numbers}) < len(raw):
        raise ValueError(
            '"lengths" is a list of positive numbers other than 1, each once, that make less than 2**31 of '
            f"{protocol.steps:,} steps"
        )
    if protocol.horizon is not None:
        return []
    return [
        dataclasses.replace(
            first,
            protocol=f"{first.protocol}-x{m:g}",
            training=dataclasses.replace(
                protocol, steps=max(round(m * protocol.steps), protocol.evaluations)
            ),
        )
        for m in raw
    ]


def _check(cell: Cell) -> None:
    """Raises ValueError if a cell cannot be trained."""
    if cell.model_config is None and cell.model not in CONFIGS:
        raise ValueError(
            f"unknown model {cell.model!r}; name one of {', '.join(CONFIGS)}, or give --model-config"
        )
    recipe, model = cell.recipe, model_of(cell)
    layers = functools.partial(decoder.layer_policies, model)
    if recipe is None:
        phases = [layers(policy_of(cell), ())]
    else:
        precision = PrecisionConfig(recipe.policy, layers=recipe.layers)
        phases = [phase.layers for phase in phases_of(precision, protocol_of(cell).steps, layers)]
        check_optimizer(recipe.deoscillate, phases)
    for phase in phases:
        check_delayed(model, phase)
    if is_whole_run(cell):
        check_protocol(cell)


def with_model(cell: Cell, path: pathlib.Path) -> Cell:
    """Returns the cell with the model of a file, by whose name its runs are known.

    Raises:
      ValueError: the file holds no model, or has the name of one of ours.
    """
    if path.stem in CONFIGS or not re.fullmatch(r"[\w-]+", path.stem):
        raise ValueError(f"--model-config {path}: name the file otherwise, by letters, digits and -")
    changed = dataclasses.replace(cell, model=path.stem, model_config=path)
    model_of(changed)
    return changed


def check_same(cells: Sequence[Cell], out: pathlib.Path) -> None:
    """Raises ValueError if finished runs have these cells' names, and another protocol, recipe or model."""
    defaults = {field.name: field.default for field in dataclasses.fields(Protocol)}
    for cell in cells:
        training, policy = dataclasses.asdict(protocol_of(cell)), str(policy_of(cell))
        parts = own_parts(cell)
        for seed in cell.seed_numbers:
            path = run_path(out, cell, seed)
            if not path.exists():
                continue
            run = read_record(path)
            recorded = defaults | run["protocol"]  # which may be older than a field
            other = {name for name, value in training.items() if recorded.get(name) != value}
            if not is_whole_run(cell) and run["resolved_policy"] != policy:
                other.add("policy")
            other |= {name for name, value in parts.items() if run.get(name, value) != value}
            if other:
                raise ValueError(
                    f"{path} was trained with another {', '.join(sorted(other))}: name another --out"
                )


def summary(cells: Sequence[Cell], out: pathlib.Path) -> str:
    """Returns the table of the finished runs of these cells, paired with fp8's by seed."""
    paths = [run_path(out, cell, seed) for cell in cells for seed in cell.seed_numbers]
    found, parts = gather([read_record(path) for path in paths if path.exists()]), []
    for (model, protocol), group in by_group(found).items():
        base = baseline(group)
        if base is None or len(group) < 2:
            continue
        lengths = lengths_of(found, model, protocol)
        rows = [_row(cell, base, lengths) for cell in group]
        measure = "P1" if is_constant(base) else "P2"
        header = f"policy, rules | runs | diverged | loss | minus fp8 | 95 % | tokens beyond fp8 ({measure})"
        parts.append(f"`{model}`, protocol `{protocol}`:\n\n{table(header, rows)}")
    return "\n\n".join(parts)


def _row(cell: CellResult, base: CellResult, lengths: Mapping[float, Mapping[int, float]]) -> list[object]:
    if cell is base:
        tokens = "-"
    elif is_constant(base):
        tokens = reached_later(cell, base)
    else:
        tokens = overhead_with_interval(effective_multiple(cell.losses, lengths))
    return [*beside(cell, base), tokens]
