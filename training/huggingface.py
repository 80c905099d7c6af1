"""Imports and exports checkpoints: `python -m training.huggingface import DIR RUN`, `export RUN DIR`.

`import` turns a folder with config.json and safetensors into a run at step 0, for eval.py and train.py
(`--init RUN` in a new folder, or `--out RUN --resume` in place). The tokenizer and other small files are kept
in RUN/huggingface, and `export` restores them. Tensors are converted one by one: memory holds the parameters
in float32 and one more tensor.
"""

if __name__ == "__main__":
    try:
        from training.process.start import prepare_process
    except ImportError as error:  # of an extra that is not installed
        raise SystemExit(f"python -m training.huggingface: error: {error}") from None

    prepare_process()  # before the other imports, which take seconds

import functools
import pathlib
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import jax
import numpy as np
import tyro

from models.configs import DecoderConfig, name_of, to_dict
from models.decoder import abstract_params
from models.huggingface.architectures import views
from models.huggingface.config import read_config, write_config
from models.huggingface.files import Writer, check_files, new_folder, read_json, small_files, write_json
from models.huggingface.weights import (
    QUANTIZATION,
    dtype_field,
    parts,
    progress,
    quantized,
    read_params,
    specs_of,
)
from mxjax.numerics.scales import ScaleRule
from training.command_line import flags
from training.config import Config, DataConfig, PrecisionConfig
from training.files import HUGGINGFACE, absolute_path
from training.process.environment import input_errors, start_jax
from training.process.start import output_errors, unwinding_signals
from training.ranges import Range, check_ranges
from training.run.checkpoints import Checkpoints, save_params
from training.run.record import model_of, read_run_config, to_json, write_run_config
from training.run.tokens import find_tokenizer

PROGRAM = "python -m training.huggingface"


def main() -> None:
    """Runs the command line."""
    jax.config.update("jax_platforms", "cpu")  # the weights need no accelerator
    commands = {"import": _later(import_checkpoint), "export": _later(export_checkpoint)}
    parse = tyro.extras.subcommand_cli_from_dict
    run = flags(lambda words: parse(commands, args=words, prog=PROGRAM, description=__doc__), program=PROGRAM)
    with unwinding_signals(), input_errors():
        start_jax()
        config = run()
    with output_errors():
        print(f"{config.n_params:,} parameters: {config}")


def _later[**P, T](command: Callable[P, T]) -> Callable[P, Callable[[], T]]:
    """Returns a function with the command's signature that returns a call of it."""

    @functools.wraps(command)
    def bind(*args: P.args, **kwargs: P.kwargs) -> Callable[[], T]:
        return functools.partial(command, *args, **kwargs)

    return bind


_TENSOR_DTYPES = "dtypes.json"  # in RUN/huggingface: the original dtype of each tensor
# In 10**9 bytes; the largest size of a file on Linux is 9.2e9 of them.
_SHARD_GB = Range("from 1e-9, a byte, to 1e9", lambda x: 1e-9 <= x <= 1e9)
_EVAL_SEQ_LEN = 2048  # unless the model's context is shorter

CheckpointFolder = Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
RunFolder = Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]


def import_checkpoint(source: CheckpointFolder, run: RunFolder) -> DecoderConfig:
    """Imports a Hugging Face checkpoint as a run, for train.py --init and eval.py.

    Args:
      source: the checkpoint's folder: config.json, and safetensors in float32, bfloat16 or float16.
      run: the folder to create.
    Raises:
      ValueError: `run` is in use, or the checkpoint is of another architecture, incomplete or damaged.
    """
    source, run = absolute_path(source), absolute_path(run)
    check_files(source)
    raw = read_json(source / "config.json")
    config = read_config(raw)
    with new_folder(run) as folder:
        params, dtypes = read_params(source, config)
        save_params(folder / "checkpoints", params)
        kept = folder / HUGGINGFACE
        kept.mkdir()
        for file in small_files(source):
            shutil.copyfile(file, kept / file.name)
        write_json(kept / _TENSOR_DTYPES, dtypes)
        values = {
            "config": to_json(_evaluation_config(config, raw)),
            "model": to_dict(config),
            "imported": str(source),
        }
        write_run_config(folder, values)
    return config


def export_checkpoint(
    run: RunFolder,
    target: CheckpointFolder,
    *,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    step: int | None = None,
    mxfp4: ScaleRule | None = None,
    shard_gb: float = 5.0,
    allow_nonfinite: bool = False,
) -> DecoderConfig:
    """Writes a run's parameters as a Hugging Face checkpoint that transformers loads.

    Args:
      run: the run's folder.
      target: the folder to create.
      dtype: dtype of the weights. Default: as each tensor was imported, or float32, which loses nothing.
      step: the checkpoint's step. Default: the last.
      mxfp4: quantize the blocks' linear layers to MXFP4 by this scale rule, rounding to nearest. Each NAME
        becomes NAME_blocks, uint8 [out, in / 32, 16], and NAME_scales, uint8 [out, in / 32], as in gpt-oss;
        transformers loads no Llama in this layout.
      shard_gb: largest size of a file's tensors, in 10**9 bytes.
      allow_nonfinite: also write weights that are NaN or infinite.
    Raises:
      ValueError: no such run or step, `target` is in use, the weights do not fit the requested format, or
        they are not finite; or the tokenizer is not the run's.
    """
    check_ranges({"shard_gb": shard_gb}, {"shard_gb": _SHARD_GB})
    run, target = absolute_path(run), absolute_path(target)
    saved = read_run_config(run)
    config = model_of(saved)
    with new_folder(target) as folder:
        with Checkpoints(run / "checkpoints") as checkpoints:
            params = jax.tree.map(np.asarray, checkpoints.restore_params(abstract_params(config), step))
        named = views(config, params)
        bad = [name for name, view in named.items() if not np.isfinite(view).all()]
        if bad and not allow_nonfinite:
            raise ValueError(
                f"{len(bad)} tensors of {run} hold NaN or infinity, {bad[0]} first; "
                "export an earlier --step, or add --allow-nonfinite"
            )
        specs = specs_of(named, dtype, run / HUGGINGFACE / _TENSOR_DTYPES)
        raw = _export_config(run / HUGGINGFACE / "config.json", saved, config)
        raw |= {dtype_field(raw): specs["model.embed_tokens.weight"].numpy_dtype.name}
        if mxfp4 is not None:
            specs, raw = quantized(specs), raw | {"quantization_config": dict(QUANTIZATION)}
        with Writer(folder, specs, int(shard_gb * 1e9)) as writer:
            for name, view in progress(named, "exporting"):
                for part, value in parts(name, view, specs, mxfp4):
                    writer.write(part, value)
        for file in small_files(run / HUGGINGFACE) if (run / HUGGINGFACE).exists() else ():
            if file.name != _TENSOR_DTYPES:
                shutil.copyfile(file, folder / file.name)
        _add_tokenizer(folder, run, saved)
        write_json(folder / "config.json", raw)
    return config


def _evaluation_config(model: DecoderConfig, raw: Mapping[str, Any]) -> Config:
    """Returns the configuration in which eval.py runs an imported model by default."""
    seq_len = min(raw.get("max_position_embeddings") or _EVAL_SEQ_LEN, _EVAL_SEQ_LEN)
    data = DataConfig(vocab_size=model.vocab_size, batch_size=1, seq_len=seq_len)
    return Config(precision=PrecisionConfig("bf16"), data=data, model=name_of(model))


def _export_config(kept: pathlib.Path, saved: Mapping[str, Any], config: DecoderConfig) -> dict[str, Any]:
    """Returns the imported config.json, or a new one."""
    if kept.exists():
        raw = read_json(kept)
        raw.pop("quantization_config", None)  # the parameters are not packed
        return raw
    return write_config(config, saved["config"]["data"]["seq_len"])


def _add_tokenizer(folder: pathlib.Path, run: pathlib.Path, saved: Mapping[str, Any]) -> None:
    """Copies the tokenizer of a run's training data, if there is one and the folder has none.

    Raises:
      ValueError: the tokenizer has other tokens than those that the run was trained on.
    """
    found, paths = find_tokenizer(run, saved["config"]["data"]["data"])
    if (folder / "tokenizer.json").exists():
        return
    if found is not None:
        shutil.copyfile(found, folder / "tokenizer.json")
        write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    elif saved.get("tokenizer") is not None:
        where = " or ".join(map(str, paths))
        print(f"{PROGRAM}: warning: no tokenizer is exported: it must lie at {where}", file=sys.stderr)


if __name__ == "__main__":
    main()
