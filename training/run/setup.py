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

from models import decoder
from models.attention.context import sequence_parts
from models.config_file import load_config
from models.configs import DecoderConfig, get_config, to_dict
from models.experts.layer import check_policies
from models.experts.traffic import check_traffic
from models.huggingface.files import small_files
from models.lora import BYTES_PACKED
from models.sharding import parts_of
from mxjax.products.implementations import check_implementations, check_remat, choose_implementation
from mxjax.runtime.checkout import commit
from training.config import Config, DataConfig, by_flag
from training.data.load import documents_of, held_out_tokens, load_data, make_sets
from training.data.megatron import is_indexed, parse_blend
from training.files import HUGGINGFACE, temporary_path
from training.log.mlperf import settings_of
from training.memory import gib, memory_there_is
from training.optimizer.config import DefaultRate, bytes_a_parameter
from training.optimizer.delayed import check_delayed
from training.optimizer.optimizers import check_no_decay, check_optimizer
from training.phases import Phase, expand, files_of, files_on_record, from_record, phases_of, to_record
from training.plan import Plan
from training.process.environment import facts
from training.process.start import check_extra
from training.process.together import is_first_process
from training.run.checksums import check_saveable, saved_steps
from training.run.frozen import check_lora
from training.run.lock import LOCK, check_unlocked
from training.run.record import (
    CONFIG,
    documents_of_run,
    from_json,
    model_of,
    read_run_config,
    to_json,
    write_run_config,
)
from training.run.resume import (
    begun_config,
    branch_point,
    check_order,
    check_same_data,
    check_same_run,
    extend_phases,
    last_checkpoint,
)
from training.run.tokens import checked_tokens
from training.sharding import check_batch, check_shards, make_mesh, parse_mesh

# Everything that a run killed before its config.json leaves behind.
_BEFORE_CONFIG = {HUGGINGFACE, LOCK, temporary_path(pathlib.Path(CONFIG)).name}


def set_up(config: Config, folder: pathlib.Path) -> Plan:
    """Returns the plan of a run in `folder`, checked; raises ValueError before anything is computed."""
    config = expand(config)
    if is_first_process():
        check_unlocked(folder)
    check_apart(config.data, folder)
    config, model, phases, source, saved = choose(config, folder)
    begun = begun_config(saved)
    mesh = make_mesh(config.mesh)
    check_lora(config, mesh.size)
    check_memory(mesh.shape, config, dataclasses.replace(model, vocab_size=config.data.vocab_size or 1))
    for extra, module in (("tensorboard", "tensorboardX"), ("wandb", "wandb")):
        if getattr(config.observe, extra):
            check_extra(extra, f"--{extra}", module)
    tokenizer = checked_tokens(config.data, saved, source, config.init)
    corpus = load_data(config.data, model.vocab_size)
    check_rate(config, source or folder, saved)
    model = dataclasses.replace(model, vocab_size=corpus.vocab_size)
    check_memory(mesh.shape, config, model)  # with the data's vocabulary
    fits = functools.partial(fits_mesh, model, phases)
    check_batch(mesh.shape, config.data.batch_size, config.accumulate, fits)
    sequence_parts(mesh.shape, config.data.batch_size // config.accumulate, config.data.seq_len)
    check_phases(mesh.shape, model, phases)
    plan = Plan(
        config,
        mesh,
        corpus,
        make_sets(
            held_out_tokens(config.data, corpus),
            config.data,
            config.eval_batches,
            corpus.vocab_size,
            config.eval_sequences,
        ),
        model,
        phases,
        imported_from(config.init) if source is None else saved.get("imported"),
        tokenizer,
        documents_of(config.data, corpus) if begun is None else documents_of_run(saved),
        policy_files=files_of(config.precision) if begun is None else files_on_record(saved),
    )
    settings_of(plan)
    if source is not None:
        check_same_data(saved, corpus.facts)
        if begun is not None and begun.steps != config.steps:
            check_order(corpus, config, begun)
    if is_first_process():
        check_unlocked(folder)  # once more: reading the data took a while
    check_folder(config.resume, folder)
    return plan


class Choice(NamedTuple):
    """The configuration and the model of a run, and the run that it continues.

    Attributes:
      source: the folder of the run that is continued, or None.
      saved: what its config.json holds, or nothing.
    """

    config: Config
    model: DecoderConfig
    phases: tuple[Phase, ...]
    source: pathlib.Path | None
    saved: dict[str, Any]


def choose(config: Config, folder: pathlib.Path) -> Choice:
    """Returns the model and the phases of a run in `folder`; raises ValueError unless they can run here."""
    source, taken = continued(config, folder)
    if source is not None and not (source / CONFIG).exists():
        raise ValueError(f"--resume: {source} holds no run; leave out --resume to start one there")
    saved = {} if source is None else read_run_config(source)
    if (begun := begun_config(saved)) is not None:
        check_same_run(config, begun, source or folder, taken)
    if config.branch is not None and begun is not None:
        # If it names a run, that may have a newer checkpoint when this one begins or is resumed.
        branch = (source or folder) / "checkpoints" / str(taken)
        config = dataclasses.replace(config, branch=begun.branch if config.resume else branch)
    config, model = choose_model(config, source or folder, saved)
    phases = choose_phases(config, model, taken, saved)
    check_computation(config, model, phases)
    return Choice(config, model, phases, source, saved)


def continued(config: Config, folder: pathlib.Path) -> tuple[pathlib.Path | None, int]:
    """Returns the folder of the run that is continued, and the steps taken; None and 0 for a new one."""
    if config.resume:
        return folder, last_checkpoint(folder)
    return (None, 0) if config.branch is None else branch_point(config.branch)


def check_apart(data: DataConfig, folder: pathlib.Path) -> None:
    """Raises ValueError if the run would write into a folder of text; hidden files of it are not read."""
    held_out = (("--eval-data", path) for path in data.eval_paths.values())
    for flag, name in (*(("--data", name) for name in data.data), *held_out):
        if is_indexed([name]) or not pathlib.Path(name).is_dir():
            continue
        place, text = folder.resolve(), pathlib.Path(name).resolve()
        if place.is_relative_to(text) and not any(p.startswith(".") for p in place.relative_to(text).parts):
            raise ValueError(
                f"--out {folder} lies in {flag} {name}, so that the run would read what it writes; name a "
                "folder elsewhere with --out"
            )


def check_folder(resume: bool, folder: pathlib.Path) -> None:
    """Raises ValueError unless a run may write in the folder: it begins in an empty one of its own."""
    check_saveable(folder)
    for parent in folder.parents:
        if parent.name == "checkpoints" and (parent.parent / CONFIG).exists():
            raise ValueError(f"--out {folder} lies among the checkpoints of a run; name a folder elsewhere")
    if resume or not folder.exists():
        return
    if {path.name for path in folder.iterdir()} - _BEFORE_CONFIG:
        raise ValueError(f"--out {folder} is not empty; add --resume to continue it, or name another folder")


def check_memory(sizes: Mapping[str, int], config: Config, model: DecoderConfig) -> None:
    """Raises ValueError if a part of the memory that every step needs is more than a device has.

    The parts are the parameters with their moments, and the tokens with the inputs of all blocks, which even
    --remat full keeps.
    """
    there_is = memory_there_is()
    parameters = model.n_params - model.n_expert_params * (1 - 1 / sizes["expert"])
    each = bytes_a_parameter(config.optimizer) if config.lora is None else BYTES_PACKED
    needed = each * parameters / (parts_of(sizes, "embed") * sizes["tensor"])
    if needed > there_is:
        tokens = f"with {model.vocab_size:,} tokens" if model.vocab_size > 1 else "without its vocabulary"
        raise ValueError(
            f"model {config.model_name} {tokens} has {model.n_params:,} parameters, which "
            f"take {gib(needed)} GiB a device with their moments, and a device has {gib(there_is)}; "
            "choose a smaller --model or --vocab-size, or more devices"
        )
    batch, seq_len = config.data.batch_size, config.data.seq_len
    kept = 4 + 2 * model.d_model * model.n_layers / config.accumulate  # bytes a token, with its id
    needed = batch * seq_len * kept / parts_of(sizes, "rows")
    if needed > there_is:
        raise ValueError(
            f"--batch-size {batch} and --seq-len {seq_len} need at least {gib(needed)} GiB a "
            f"device, and a device has {gib(there_is)}; lower them, or raise --accumulate"
        )


def check_computation(config: Config, model: DecoderConfig, phases: Sequence[Phase]) -> None:
    """Raises ValueError or NotImplementedError unless the policies of all phases can run here."""
    owners = parse_mesh(config.mesh, None)["expert"]
    for phase in phases:
        check_implementations(phase.layers.policies, config.precision.implementation)
        check_delayed(model, phase.layers)
        check_policies(model, phase.layers, config.precision.implementation, owners)
        check_traffic(config.expert_traffic, phase.layers, owners)
        check_remat(config.remat, phase.layers.policies, config.precision.implementation)
    check_optimizer(config.precision.deoscillate, [phase.layers for phase in phases])
    check_no_decay(config.optimizer, model)


def check_phases(sizes: Mapping[str, int], model: DecoderConfig, phases: Sequence[Phase]) -> None:
    """Raises ValueError unless a mesh of these sizes shards the parameters as every phase needs."""
    for phase in phases:
        check_shards(sizes, model, phase.layers)


def fits_mesh(model: DecoderConfig, phases: Sequence[Phase], sizes: Mapping[str, int]) -> bool:
    """Returns whether a mesh of these sizes shards the parameters as every phase needs."""
    with contextlib.suppress(ValueError):
        check_phases(sizes, model, phases)
        return True
    return False


def choose_model(config: Config, folder: pathlib.Path, saved: dict[str, Any]) -> tuple[Config, DecoderConfig]:
    """Returns the model of --init, of the run to continue, or of --model-config or --model.

    With --init, and for an imported run, the returned configuration has the name and vocabulary of that
    model. In the last case the data decides the vocabulary.
    """
    continues = bool(saved)
    if config.init is None and "imported" not in saved:
        if continues:
            return config, model_of(saved)
        named = get_config(config.model) if config.model_config is None else load_config(config.model_config)
        return config, named
    source = folder if continues or config.init is None else config.init
    saved = saved if continues else read_run_config(source)
    model, name = model_of(saved), from_json(saved["config"]).model_name
    if config.model not in (name, Config.model) or config.data.vocab_size not in (None, model.vocab_size):
        raise ValueError(
            f"{source} holds {name} with {model.vocab_size} tokens; leave out --model and --vocab-size"
        )
    if not continues and not saved_steps(source / "checkpoints"):
        raise ValueError(f"{source} has no checkpoint to begin with")
    if not continues and (source / HUGGINGFACE).exists():
        small_files(source / HUGGINGFACE)  # checks them, before any is copied
    data = dataclasses.replace(config.data, vocab_size=model.vocab_size)
    return dataclasses.replace(config, model=name, data=data), model


def check_rate(config: Config, folder: pathlib.Path, saved: dict[str, Any]) -> None:
    """Raises ValueError if imported weights would train at the default rate, which is one from scratch."""
    source = folder if saved else config.init
    begins = source is not None and begun_config(saved) is None and (source / HUGGINGFACE).exists()
    if begins and isinstance(config.optimizer.lr, DefaultRate):
        raise ValueError(
            f"--lr {config.optimizer.lr:g}, the default, is for training from scratch and ruins the imported "
            f"weights of {source}; add --lr, for example --lr 2e-5"
        )


def choose_phases(
    config: Config, model: DecoderConfig, taken: int, saved: dict[str, Any]
) -> tuple[Phase, ...]:
    """Returns the phases that a run to continue has on record, or those that the configuration names."""
    if (begun := from_record(saved)) is not None:
        same_length = saved["config"]["steps"] == config.steps
        return begun if same_length else extend_phases(begun, config, taken)
    return phases_of(config.precision, config.steps, functools.partial(decoder.layer_policies, model))


def description_of(plan: Plan) -> dict[str, Any]:
    """Returns the values of config.json: all resolved values, policies, data and devices."""
    return {
        **({} if plan.imported is None else {"imported": plan.imported}),
        "config": to_json(plan.config),
        "model": to_dict(plan.model),
        **to_record(plan.phases),
        "policy_files": dict(plan.policy_files),
        "data": plan.corpus.facts,
        "tokenizer": plan.tokenizer,
        **({} if plan.documents is None else {"documents": plan.documents._asdict()}),
        "implementation": choose_implementation(plan.config.precision.implementation),
        "environment": facts() | ({} if (code := commit()) is None else {"commit": code}),
        "mesh": dict(plan.mesh.shape),
    }


def imported_from(init: pathlib.Path | None) -> str | None:
    """Returns the folder of the checkpoint whose weights --init names; None if they have trained since."""
    saved = {} if init is None else read_run_config(init)
    return saved.get("imported") if begun_config(saved) is None else None


def open_folder(plan: Plan, folder: pathlib.Path) -> None:
    """Creates the run's folder, with config.json and what an imported checkpoint brings."""
    values, config = description_of(plan), plan.config
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / CONFIG).exists():  # remains of a start that was killed
        shutil.rmtree(folder / HUGGINGFACE, ignore_errors=True)
    origin = config.init
    if config.branch is not None and not config.resume:
        origin = branch_point(config.branch).folder
    if origin is not None and (origin / HUGGINGFACE).exists():
        (folder / HUGGINGFACE).mkdir(exist_ok=True)
        for file in small_files(origin / HUGGINGFACE):
            shutil.copy2(file, folder / HUGGINGFACE)
    write_run_config(folder, values)


_SHOWN = 5  # differences in an error message


def must_agree(plan: Plan, folder: pathlib.Path) -> dict[str, Any]:
    """Returns everything that must be the same in all processes, by names for messages."""
    flags = {name: str(value) for name, value in by_flag(plan.config).items()}
    flags |= {"out": str(folder.resolve())}
    del flags["data"], flags["eval_data"]  # they may lie elsewhere on each host; checksums tell them apart
    data = plan.corpus.facts | {"weights": parse_blend(plan.config.data.data)[1]}
    del data["source"]
    sets = [[s.name, s.n_bytes, *(zlib.crc32(b.tobytes()) for b in s.batches)] for s in plan.held_out]
    devices = ", ".join(sorted({device.device_kind for device in jax.local_devices()}))
    return {
        **{f"--{name.replace('_', '-')}": value for name, value in flags.items()},
        "checksum of the model's shape": _checksum(to_dict(plan.model)),
        "checksum of all layers' policies": _checksum(to_record(plan.phases)),
        **{f"the data's {name}": value for name, value in data.items()},
        "checksum of the evaluation sets": _checksum(sets),
        "mask of documents": plan.documents,
        **facts(),
        "device": devices,
        "implementation": choose_implementation(plan.config.precision.implementation),
    }


def _checksum(value: object) -> str:
    return f"{zlib.crc32(json.dumps(value).encode()):08x}"


def check_same(descriptions: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError unless `must_agree` of all processes equals the first."""
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
