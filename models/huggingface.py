"""Checkpoints to and from Hugging Face: `python -m models.huggingface import DIR RUN`, `export RUN DIR`.

`import` makes a run's folder, at step 0, of a folder with config.json and safetensors; eval.py and train.py
go on from there (`--init RUN` in a new folder, or `--out RUN --resume` in place). Tokenizer and other small
files are kept in RUN/huggingface, and `export` puts them back. Tensors pass one by one: memory holds the
parameters in float32, and one tensor more.
"""

import contextlib
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.progress import track

from models import llama
from models.configs import LlamaConfig, from_dict, name_of, to_dict
from models.huggingface_config import read_config, write_config
from models.huggingface_tensors import (
    DTYPES,
    QUANTIZATION,
    check_tensors,
    check_tied_head,
    flat_shape,
    parts,
    quantized,
    shapes,
    views,
)
from models.safetensors_files import Reader, Spec, Writer
from mxjax.scales import ScaleRule
from mxjax.training.checkpoint import Checkpoints, save_params
from mxjax.training.config import Config, DataConfig, PrecisionConfig
from mxjax.training.description import HUGGINGFACE, read_description, to_json
from mxjax.training.environment import input_errors
from mxjax.training.tokenizer import tokenizer_path

_TENSOR_DTYPES = "dtypes.json"  # in RUN/huggingface: the dtype that each tensor came in
_KEPT_SUFFIXES = {".json", ".jinja", ".model", ".txt", ""}
_EVAL_SEQ_LEN = 2048  # unless the model's context is shorter

CheckpointFolder = Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
RunFolder = Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]


def import_checkpoint(source: CheckpointFolder, run: RunFolder) -> LlamaConfig:
    """Makes a run's folder of a Hugging Face Llama, for train.py --init and eval.py.

    Args:
      source: the checkpoint's folder: config.json, and safetensors in float32, bfloat16 or float16.
      run: the folder to make.
    Raises:
      ValueError: `run` is in use, or the checkpoint is no Llama, incomplete or damaged.
    """
    raw = _read_json(source / "config.json")
    config = read_config(raw)
    with new_folder(run) as folder:
        params, dtypes = _read_params(source, config)
        save_params(folder / "checkpoints", params)
        kept = folder / HUGGINGFACE
        kept.mkdir()
        for file in _small_files(source):
            shutil.copyfile(file, kept / file.name)
        _write_json(kept / _TENSOR_DTYPES, dtypes)
        description = {
            "config": to_json(_evaluation_config(config, raw)),
            "model": to_dict(config),
            "imported": str(source),
        }
        _write_json(folder / "config.json", description)
    return config


def export_checkpoint(
    run: RunFolder,
    target: CheckpointFolder,
    *,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    step: int | None = None,
    mxfp4: ScaleRule | None = None,
    shard_gb: float = 5.0,
) -> LlamaConfig:
    """Writes a run's parameters as a Hugging Face checkpoint that transformers loads.

    Args:
      run: the run's folder.
      target: the folder to make.
      dtype: of the weights. Default, as each tensor was imported, or float32, which loses nothing.
      step: the checkpoint's step. Default, the last.
      mxfp4: quantize the blocks' linear layers to MXFP4 by this scale rule, to nearest. Each NAME becomes
        NAME_blocks, uint8 [out, in / 32, 16], and NAME_scales, uint8 [out, in / 32], the layout of
        transformers' gpt-oss; transformers itself loads no Llama in it.
      shard_gb: largest size of a file's tensors, in 10**9 bytes.
    Raises:
      ValueError: no such run or step, `target` is in use, or the weights do not fit what is asked for.
    """
    if shard_gb <= 0:
        raise ValueError(f"--shard-gb must be positive, got {shard_gb}")
    description = read_description(run)
    config = from_dict(description["model"])
    with new_folder(target) as folder:
        with Checkpoints(run / "checkpoints") as checkpoints:
            params = jax.tree.map(np.asarray, checkpoints.restore_params(shapes(config), step))
        named = views(config, params)
        specs = _specs(named, dtype, run / HUGGINGFACE / _TENSOR_DTYPES)
        raw = _export_config(run / HUGGINGFACE / "config.json", description, config)
        raw |= {_dtype_field(raw): _spelled(specs["model.embed_tokens.weight"].dtype)}
        if mxfp4 is not None:
            specs, raw = quantized(specs), raw | {"quantization_config": dict(QUANTIZATION)}
        with Writer(folder, specs, int(shard_gb * 1e9)) as writer:
            for name, view in _progress(named, "exporting"):
                for part, value in parts(name, view, specs, mxfp4):
                    writer.write(part, value)
        for file in _small_files(run / HUGGINGFACE):
            if file.name != _TENSOR_DTYPES:
                shutil.copyfile(file, folder / file.name)
        _add_tokenizer(folder, description["config"]["data"]["data"] or ())
        _write_json(folder / "config.json", raw)
    return config


@contextlib.contextmanager
def new_folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Gives a folder to fill that becomes `path` when all has gone well, and else is removed.

    Raises:
      ValueError: `path` exists and is not an empty folder.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} is not an empty folder; name another")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.mkdir()
    try:
        yield partial
        if path.exists():
            path.rmdir()
        partial.replace(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _read_params(source: pathlib.Path, config: LlamaConfig) -> tuple[llama.Params, dict[str, str]]:
    """Returns the parameters in float32, and the dtype that each tensor has in the checkpoint."""
    abstract, tree = jax.tree.flatten(shapes(config))
    leaves: list[Any] = [np.empty(leaf.shape, leaf.dtype) for leaf in abstract]
    dtypes = _fill(views(config, jax.tree.unflatten(tree, leaves)), source, config)
    for i in range(len(leaves)):  # one by one: orbax would copy numpy's arrays, all at once
        leaves[i] = jnp.asarray(leaves[i])
    return jax.tree.unflatten(tree, leaves), dtypes


def _fill(named: Mapping[str, np.ndarray], source: pathlib.Path, config: LlamaConfig) -> dict[str, str]:
    """Reads every tensor into its view; returns their dtypes."""
    with Reader(source) as reader:
        check_tensors(reader.specs, config)
        check_tied_head(reader, config)
        for name, view in _progress(named, "importing"):
            view[...] = reader.read(name).reshape(view.shape)
        return {name: reader.specs[name].dtype for name in named}


def _evaluation_config(model: LlamaConfig, raw: Mapping[str, Any]) -> Config:
    """Returns how eval.py runs an imported model unless told otherwise."""
    seq_len = min(raw.get("max_position_embeddings") or _EVAL_SEQ_LEN, _EVAL_SEQ_LEN)
    data = DataConfig(vocab_size=model.vocab_size, batch_size=1, seq_len=seq_len)
    return Config(precision=PrecisionConfig("bf16"), data=data, model=name_of(model))


def _specs(named: Mapping[str, np.ndarray], dtype: str | None, kept: pathlib.Path) -> dict[str, Spec]:
    """Returns what to write of each tensor."""
    dtypes = json.loads(kept.read_text()) if kept.exists() and dtype is None else {}
    default = DTYPES[dtype or "float32"]
    return {name: Spec(dtypes.get(name, default), flat_shape(view)) for name, view in named.items()}


def _export_config(kept: pathlib.Path, description: Mapping[str, Any], config: LlamaConfig) -> dict[str, Any]:
    """Returns config.json: the imported one if there is one."""
    if kept.exists():
        return _read_json(kept)
    return write_config(config, description["config"]["data"]["seq_len"])


def _add_tokenizer(folder: pathlib.Path, prefixes: Iterable[str]) -> None:
    """Adds the tokenizer of the data that a run was trained on, if there is one and the folder has none."""
    found = [path for path in map(tokenizer_path, prefixes) if path.exists()]
    if found and not (folder / "tokenizer.json").exists():
        shutil.copyfile(found[0], folder / "tokenizer.json")
        _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


def _dtype_field(raw: Mapping[str, Any]) -> str:
    return "dtype" if "dtype" in raw else "torch_dtype"  # transformers 5 and 4


def _spelled(dtype: str) -> str:
    return next(name for name, theirs in DTYPES.items() if theirs == dtype)


def _small_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of a checkpoint besides its weights: configuration, tokenizer, license."""
    files = sorted(f for f in folder.glob("*") if f.is_file() and not f.name.startswith("."))
    return [f for f in files if f.suffix in _KEPT_SUFFIXES and not f.name.endswith(".index.json")]


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path.parent} is no Hugging Face checkpoint: it has no {path.name}") from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must hold an object")
    return raw


def _write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _progress(named: Mapping[str, np.ndarray], what: str) -> Iterator[tuple[str, np.ndarray]]:
    yield from track(named.items(), what, len(named), disable=not sys.stdout.isatty())


def main() -> None:
    """Runs the command line."""
    jax.config.update("jax_platforms", "cpu")  # weights pass through memory alone
    with input_errors():
        commands = {"import": import_checkpoint, "export": export_checkpoint}
        config = tyro.extras.subcommand_cli_from_dict(commands, description=__doc__)
        print(f"{config.n_params:,} parameters: {config}")


if __name__ == "__main__":
    main()
