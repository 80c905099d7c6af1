"""A run that can begin: what it trains, on what and in which phases, all of it checked and described."""

import contextlib
import dataclasses
import functools
import json
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from models import llama
from models.configs import LlamaConfig, from_dict, get_config, to_dict
from mxjax.implementations import check_plans, choose_implementation
from mxjax.layers import LayerPolicies
from mxjax.remat import check_remat
from training import mllog, parameters
from training.config import Config
from training.data.megatron import PackedCorpus
from training.data.text import Corpus, evaluation_batches, load_data
from training.environment import facts
from training.mesh import check_batch, make_mesh
from training.run_config import HUGGINGFACE, check_resumable, from_json, read_description, to_json
from training.schedule import Phase, phases_of
from training.tensorboard import check_installed

_BEFORE_CONFIG = {HUGGINGFACE, "config.tmp"}  # all that a run leaves that is killed before config.json


class Run(NamedTuple):
    """What stays the same throughout a run, or a phase of it."""

    config: Config
    mesh: jax.sharding.Mesh
    folder: pathlib.Path
    corpus: Corpus | PackedCorpus
    held_out: list[np.ndarray]
    """The batches of an evaluation."""
    model: LlamaConfig
    phases: tuple[Phase, ...]
    phase: Phase
    """The one that is running; at first the first."""

    def batch_of(self, step: int) -> tuple[np.ndarray, dict[str, list]]:
        """Returns a step's batch, and what of the data it is."""
        arguments = self.config.data, self.config.seed, self.config.steps, step - 1
        return next(self.corpus.batches(*arguments)), self.corpus.batch_indices(*arguments)


def set_up(config: Config) -> Run:
    """Reads and checks all that a run needs; ValueError before anything is computed."""
    folder = config.folder()
    if config.resume:
        check_same_run(config, folder)
    config, model = choose_model(config, folder)
    phases = phases_of(config.precision, config.steps, functools.partial(llama.layer_policies, model))
    for phase in phases:
        check_plans(phase.layers.policies, config.precision.implementation)
        check_remat(config.remat, phase.layers.policies, config.precision.implementation)
    if config.observe.tensorboard:
        check_installed()
    mesh = make_mesh(config.mesh)
    corpus = load_data(config.data, model.vocab_size)
    model = dataclasses.replace(model, vocab_size=corpus.vocab_size)
    fixed = config.resume or config.init is not None
    flags = functools.partial(mesh_flags, model, phases, fixed)
    check_batch(mesh.shape, config.data.batch_size, config.accumulate, flags)
    check_phases(mesh.shape, model, phases)
    held_out = evaluation_batches(
        corpus.validation,
        config.data,
        config.eval_batches,
        corpus.vocab_size,
        n_sequences=config.eval_sequences,
    )
    run = Run(config, mesh, folder, corpus, list(held_out), model, phases, phases[0])
    mllog_settings(run)
    if config.resume:
        check_same_data(folder, corpus)
    elif folder.exists() and {path.name for path in folder.iterdir()} - _BEFORE_CONFIG:
        raise ValueError(f"--out {folder} is not empty; add --resume to continue it, or name another folder")
    return run


def check_phases(sizes: Mapping[str, int], model: LlamaConfig, phases: Sequence[Phase]) -> None:
    """Raises ValueError unless a mesh of these sizes cuts the model's parameters as every phase needs it."""
    for phase in phases:
        parameters.check_cuts(sizes, model, phase.layers)


def mesh_flags(
    model: LlamaConfig, phases: Sequence[Phase], fixed: bool, sizes: Mapping[str, int]
) -> str | None:
    """Returns what train.py needs besides --mesh for a mesh of these sizes: nothing, or, unless the model is
    fixed, a larger vocabulary; None if it cannot cut the model."""
    tensor = 1 if fixed else sizes["tensor"]
    for vocab_size in (model.vocab_size, -(-model.vocab_size // tensor) * tensor):
        with contextlib.suppress(ValueError):
            check_phases(sizes, dataclasses.replace(model, vocab_size=vocab_size), phases)
            return f" --vocab-size {vocab_size}" if vocab_size != model.vocab_size else ""
    return None


def choose_model(config: Config, folder: pathlib.Path) -> tuple[Config, LlamaConfig]:
    """Returns the model: that of --init, of an imported run to continue, or else the one that --model names.

    Of the first two, the name and the vocabulary are put into the configuration that is returned; of the
    last, the data will say which vocabulary it has.
    """
    continues = config.resume and (folder / "config.json").exists()
    saved = read_description(folder) if continues else {}
    if config.init is None and "imported" not in saved:
        return config, get_config(config.model)
    source = folder if continues or config.init is None else config.init
    saved = read_description(source)
    model, name = from_dict(saved["model"]), saved["config"]["model"]
    if config.model not in (name, Config.model) or config.data.vocab_size not in (None, model.vocab_size):
        raise ValueError(
            f"{source} holds {name} with {model.vocab_size} tokens; leave out --model and --vocab-size"
        )
    if not continues and not any((source / "checkpoints").glob("[0-9]*")):
        raise ValueError(f"{source} has no checkpoint to begin with")
    data = dataclasses.replace(config.data, vocab_size=model.vocab_size)
    return dataclasses.replace(config, model=name, data=data), model


def check_same_run(config: Config, folder: pathlib.Path) -> None:
    """Raises ValueError unless `folder` holds a run of this configuration, or an import not begun."""
    if not (folder / "config.json").exists():
        raise ValueError(f"--resume: {folder} holds no run; leave out --resume to start one there")
    saved = read_description(folder)
    if "data" in saved:
        check_resumable(config, from_json(saved["config"]), folder)


def check_same_data(folder: pathlib.Path, corpus: Corpus | PackedCorpus) -> None:
    """Raises ValueError if the run in `folder` began with other data."""
    began_with = read_description(folder).get("data", corpus.facts)
    if began_with != corpus.facts:
        raise ValueError(f"--resume: the data is {corpus.facts}, but the run began with {began_with}")


def mllog_settings(run: Run) -> dict[str, Any]:
    """Returns what MLPerf's log says of the run before it begins; nothing without --mllog."""
    if not run.config.mlperf.mllog:
        return {}
    sequences = sum(len(batch) for batch in run.held_out)
    layers = [layer for phase in run.phases for layer in phase.layers.items()]
    policies = LayerPolicies(*zip(*layers, strict=True))  # of all phases, for their lowest precision
    return mllog.settings(run.config, policies, sequences, jax.devices()[0].device_kind)


def write_description(run: Run) -> None:
    """Opens the run's folder and writes config.json: every resolved value, each layer's policy, facts of the
    data and the machine."""
    description: dict[str, Any] = {
        "config": to_json(run.config),
        "model": to_dict(run.model),
        "phases": [
            phase._asdict() | {"layers": {name: str(policy) for name, policy in phase.layers.items()}}
            for phase in run.phases
        ],
        "data": run.corpus.facts,
        "implementation": choose_implementation(run.config.precision.implementation),
        "environment": facts(),
        "mesh": dict(run.mesh.shape),
    }
    run.folder.mkdir(parents=True, exist_ok=True)
    if not (run.folder / "config.json").exists():  # what a start that was killed has left
        shutil.rmtree(run.folder / HUGGINGFACE, ignore_errors=True)
    if (init := run.config.init) is not None and (init / HUGGINGFACE).exists():
        shutil.copytree(init / HUGGINGFACE, run.folder / HUGGINGFACE, dirs_exist_ok=True)
    path = run.folder / "config.json"
    if path.exists() and "imported" in (before := read_description(run.folder)):
        description["imported"] = before["imported"]
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(description, indent=2) + "\n")
    partial.replace(path)
