"""Set-up of a run: model, data, mesh and phases, checked before anything is computed.

All processes of a run must agree on flags, data, versions and devices; otherwise they would train on a
mixture.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
import shutil
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from models import llama
from models.config_file import load_config
from models.configs import LlamaConfig, get_config, to_dict
from models.huggingface.files import check_files
from models.sharding import batch_parts_of
from mxjax.policy.layers import LayerPolicies
from mxjax.products.implementations import check_implementations, check_remat, choose_implementation
from training.config import Config, by_flag
from training.data.load import load_data
from training.data.megatron import MegatronCorpus
from training.data.text import TextCorpus, evaluation_batches
from training.files import temporary_path
from training.log import mlperf as mlperf_log
from training.log import sinks as tensorboard
from training.log import sinks as wandb_run
from training.log.metrics import FILE as METRICS
from training.log.metrics import SPIKES, read_records
from training.memory import gib, memory_there_is
from training.optimizer import check_optimizer
from training.phases import Phase, expand, from_record, phases_of, to_record
from training.process.environment import facts
from training.process.together import gather, is_first_process
from training.run.checksums import check_saveable, saved_steps
from training.run.lock import FILE as LOCK
from training.run.lock import check_unlocked
from training.run.record import (
    FILE,
    HUGGINGFACE,
    from_json,
    model_of,
    read_run_config,
    to_json,
    write_run_config,
)
from training.run.resume import (
    begun_run,
    check_order,
    check_same_data,
    check_same_run,
    check_tokens_of,
    extend_phases,
    last_checkpoint,
)
from training.sharding import check_batch, check_shards, filled_size, make_mesh, resize_on

# Everything that a run killed before its config.json leaves behind.
_BEFORE_CONFIG = {HUGGINGFACE, LOCK, temporary_path(pathlib.Path(FILE)).name}


class Run(NamedTuple):
    """Everything that stays the same throughout a run.

    Attributes:
      folder: where the run writes.
      had_folder: whether the folder was there before the run.
      corpus: the training data.
      held_out: the batches of an evaluation, whole in every process.
    """

    config: Config
    mesh: jax.sharding.Mesh
    folder: pathlib.Path
    had_folder: bool
    corpus: TextCorpus | MegatronCorpus
    held_out: list[np.ndarray]
    model: LlamaConfig
    phases: tuple[Phase, ...]

    def batch_of(self, step: int) -> tuple[np.ndarray, dict[str, list]]:
        """Returns the batch of a step and its origin in the data."""
        arguments = self.config.data, self.config.seed, self.config.steps, step - 1
        return next(self.corpus.batches(*arguments)), self.corpus.batch_indices(*arguments)

    @property
    def filled_vocab_size(self) -> int:
        """The vocabulary of the training state; see `training.sharding`."""
        return filled_size(self.mesh.shape, self.model, [phase.layers for phase in self.phases])

    def filled(self, tree: Any) -> Any:
        """Returns parameters, or a training state, with the vocabulary that the mesh needs."""
        return resize_on(self.mesh, tree, self.filled_vocab_size)

    def unfilled(self, tree: Any) -> Any:
        """Returns parameters, or a training state, with the model's own vocabulary, as in checkpoints."""
        return resize_on(self.mesh, tree, self.model.vocab_size)


def set_up(config: Config) -> Run:
    """Reads and checks everything that a run needs; raises ValueError before anything is computed."""
    folder = config.folder()
    config = expand(config)
    if is_first_process():
        check_unlocked(folder)
    if config.resume:
        check_same_run(config, folder)
    config, model = choose_model(config, folder)
    mesh = make_mesh(config.mesh)
    check_memory(mesh.shape, config, dataclasses.replace(model, vocab_size=config.data.vocab_size or 1))
    phases = choose_phases(config, model, folder)
    for phase in phases:
        check_implementations(phase.layers.policies, config.precision.implementation)
        check_remat(config.remat, phase.layers.policies, config.precision.implementation)
    check_optimizer(config, [phase.layers for phase in phases])
    if config.observe.tensorboard:
        tensorboard.check_tensorboard()
    if config.observe.wandb:
        wandb_run.check_wandb()
    if config.init is not None and config.data.data:
        check_tokens_of(config.init, "--data", config.data.data[-1])
    corpus = load_data(config.data, model.vocab_size)
    model = dataclasses.replace(model, vocab_size=corpus.vocab_size)
    check_memory(mesh.shape, config, model)
    fits = functools.partial(fits_mesh, model, phases)
    check_batch(mesh.shape, config.data.batch_size, config.accumulate, fits)
    check_phases(mesh.shape, model, phases)
    held_out = evaluation_batches(
        corpus.validation,
        config.data,
        config.eval_batches,
        corpus.vocab_size,
        n_sequences=config.eval_sequences,
    )
    run = Run(config, mesh, folder, folder.exists(), corpus, list(held_out), model, phases)
    mlperf_settings(run)
    if config.resume:
        check_same_data(folder, corpus.facts)
        if (begun := begun_run(folder)) is not None and begun.steps != config.steps:
            check_order(corpus, config, begun)
    if is_first_process():
        check_unlocked(folder)  # once more: reading the data took a while
    check_folder(config, folder)
    return run


def check_folder(config: Config, folder: pathlib.Path) -> None:
    """Raises ValueError unless a run may write in the folder: it begins in an empty one."""
    check_saveable(folder)
    if config.resume or not folder.exists():
        return
    if {path.name for path in folder.iterdir()} - _BEFORE_CONFIG:
        raise ValueError(f"--out {folder} is not empty; add --resume to continue it, or name another folder")


def check_memory(sizes: Mapping[str, int], config: Config, model: LlamaConfig) -> None:
    """Raises ValueError if a part of the memory that every step needs is more than a device has.

    The parts are the parameters with their moments, and the tokens with the inputs of all blocks, which even
    --remat full keeps.
    """
    there_is = memory_there_is()
    needed = 12 * model.n_params / (sizes["fsdp"] * sizes["tensor"])
    if needed > there_is:
        tokens = f"with {model.vocab_size:,} tokens" if model.vocab_size > 1 else "without its vocabulary"
        raise ValueError(
            f"model {config.model_name} {tokens} has {model.n_params:,} parameters, which "
            f"take {gib(needed)} GiB a device with their moments, and a device has {gib(there_is)}; "
            "choose a smaller --model or --vocab-size, or more devices"
        )
    batch, seq_len = config.data.batch_size, config.data.seq_len
    kept = 4 + 2 * model.d_model * model.n_layers / config.accumulate  # bytes a token, with its id
    needed = batch * seq_len * kept / batch_parts_of(sizes)
    if needed > there_is:
        raise ValueError(
            f"--batch-size {batch} and --seq-len {seq_len} need at least {gib(needed)} GiB a "
            f"device, and a device has {gib(there_is)}; lower them, or raise --accumulate"
        )


def check_phases(sizes: Mapping[str, int], model: LlamaConfig, phases: Sequence[Phase]) -> None:
    """Raises ValueError unless a mesh of these sizes shards the parameters as every phase needs."""
    for phase in phases:
        check_shards(sizes, model, phase.layers)


def fits_mesh(model: LlamaConfig, phases: Sequence[Phase], sizes: Mapping[str, int]) -> bool:
    """Returns whether a mesh of these sizes shards the parameters as every phase needs."""
    with contextlib.suppress(ValueError):
        check_phases(sizes, model, phases)
        return True
    return False


def choose_model(config: Config, folder: pathlib.Path) -> tuple[Config, LlamaConfig]:
    """Returns the model of --init, of the run to continue, or of --model-config or --model.

    With --init, and for an imported run, the returned configuration has the name and vocabulary of that
    model. In the last case the data decides the vocabulary.
    """
    continues = config.resume and (folder / FILE).exists()
    saved = read_run_config(folder) if continues else {}
    if config.init is None and "imported" not in saved:
        if continues:
            return config, model_of(saved)
        named = get_config(config.model) if config.model_config is None else load_config(config.model_config)
        return config, named
    source = folder if continues or config.init is None else config.init
    saved = read_run_config(source)
    model, name = model_of(saved), from_json(saved["config"]).model_name
    if config.model not in (name, Config.model) or config.data.vocab_size not in (None, model.vocab_size):
        raise ValueError(
            f"{source} holds {name} with {model.vocab_size} tokens; leave out --model and --vocab-size"
        )
    if not continues and not saved_steps(source / "checkpoints"):
        raise ValueError(f"{source} has no checkpoint to begin with")
    if not continues and (source / HUGGINGFACE).exists():
        check_files(source / HUGGINGFACE)  # before anything of it is copied
    data = dataclasses.replace(config.data, vocab_size=model.vocab_size)
    return dataclasses.replace(config, model=name, data=data), model


def choose_phases(config: Config, model: LlamaConfig, folder: pathlib.Path) -> tuple[Phase, ...]:
    """Returns the phases that a run to continue has on record, or those that the configuration names."""
    saved = read_run_config(folder) if config.resume and (folder / FILE).exists() else {}
    if (begun := from_record(saved)) is not None:
        same_length = saved["config"]["steps"] == config.steps
        return begun if same_length else extend_phases(begun, config, last_checkpoint(folder))
    return phases_of(config.precision, config.steps, functools.partial(llama.layer_policies, model))


def mlperf_settings(run: Run) -> dict[str, Any]:
    """Returns the settings at the head of MLPerf's log; empty without --mllog."""
    if not run.config.mlperf.mllog:
        return {}
    sequences = sum(len(batch) for batch in run.held_out)
    layers = [layer for phase in run.phases for layer in phase.layers.items()]
    policies = LayerPolicies(*zip(*layers, strict=True))  # of all phases, for their lowest precision
    return mlperf_log.settings(run.config, policies, sequences, jax.devices()[0].device_kind, run.mesh.shape)


def open_folder(run: Run) -> None:
    """Creates the run's folder and writes config.json: all resolved values, policies, data and devices."""
    values: dict[str, Any] = {
        "config": to_json(run.config),
        "model": to_dict(run.model),
        **to_record(run.phases),
        "data": run.corpus.facts,
        "implementation": choose_implementation(run.config.precision.implementation),
        "environment": facts(),
        "mesh": dict(run.mesh.shape),
    }
    run.folder.mkdir(parents=True, exist_ok=True)
    begun = (run.folder / FILE).exists()
    if not begun:  # remains of a start that was killed
        shutil.rmtree(run.folder / HUGGINGFACE, ignore_errors=True)
    if (init := run.config.init) is not None and (init / HUGGINGFACE).exists():
        (run.folder / HUGGINGFACE).mkdir(exist_ok=True)
        for file in filter(pathlib.Path.is_file, (init / HUGGINGFACE).iterdir()):
            shutil.copy2(file, run.folder / HUGGINGFACE)
    if begun and "imported" in (before := read_run_config(run.folder)):
        values["imported"] = before["imported"]
    write_run_config(run.folder, values)


def remove_without_steps(run: Run) -> None:
    """Removes what a new run has written if it has no checkpoint and no step on record."""
    trained = saved_steps(run.folder / "checkpoints") or any("loss" in r for r in read_records(run.folder))
    if not (run.config.resume or trained):
        remove_beginning(run)


def remove_beginning(run: Run) -> None:
    """Removes what a run that ends before its first step has written, and nothing else."""
    folder = run.folder
    if not is_first_process():
        return
    for name in (HUGGINGFACE, "profile", "wandb"):
        shutil.rmtree(folder / name, ignore_errors=True)
    names = FILE, LOCK, METRICS, SPIKES, mlperf_log.FILE, wandb_run.ID_FILE
    for path in (*(folder / name for name in names), *folder.glob(f"{tensorboard.PREFIX}*")):
        path.unlink(missing_ok=True)
    for path in (folder / "checkpoints", *([] if run.had_folder else [folder])):
        with contextlib.suppress(OSError):  # not empty
            path.rmdir()


_SHOWN = 5  # differences in an error message


def check_agreement(run: Run) -> None:
    """Compares the runs that all processes have set up; all of them must call it.

    Raises:
      ValueError: they differ; the message names the processes, what differs, and how.
    """
    check_same(gather(lambda: description(run)))


def description(run: Run) -> dict[str, Any]:
    """Returns everything that must be the same in all processes, by names for messages."""
    flags = {name: str(value) for name, value in by_flag(run.config).items()}
    flags |= {"out": str(run.folder.resolve())}
    devices = ", ".join(sorted({device.device_kind for device in jax.local_devices()}))
    return {
        **{f"--{name.replace('_', '-')}": value for name, value in flags.items()},
        "checksum of the model's shape": _checksum(to_dict(run.model)),
        "checksum of all layers' policies": _checksum(to_record(run.phases)),
        **{f"the data's {name}": value for name, value in run.corpus.facts.items()},
        **facts(),
        "device": devices,
        "implementation": choose_implementation(run.config.precision.implementation),
    }


def _checksum(value: object) -> str:
    return f"{zlib.crc32(json.dumps(value).encode()):08x}"


def check_same(descriptions: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError unless all descriptions equal the first."""
    first = descriptions[0]
    different = [index for index, other in enumerate(descriptions) if other != first]
    if not different:
        return
    other = descriptions[different[0]]
    found = [f"{name} is {other[name]} and not {first[name]}" for name in first if other[name] != first[name]]
    more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    who = f"process {different[0]} differs"
    if len(different) > 1:
        who = f"processes {', '.join(map(str, different))} differ"
    raise ValueError(
        f"--distributed: {who} from process 0: {', '.join(found[:_SHOWN])}{more}; "
        "start all processes with the same flags, data, versions and kind of device"
    )
