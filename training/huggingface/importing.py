"""The import of a Hugging Face checkpoint as a run at step 0."""

import pathlib
import shutil
from collections.abc import Mapping
from typing import Annotated, Any

import tyro

from models.configs import DecoderConfig, name_of, to_dict
from models.huggingface.config import read_config
from models.huggingface.files import Reader, new_folder, read_json, small_files, write_json
from models.huggingface.packed import PackedReader, layout_of
from models.huggingface.weights import read_params
from training.config import Config, DataConfig, PrecisionConfig
from training.files import HUGGINGFACE, absolute_path
from training.huggingface.model_card import import_in_words
from training.run.checkpoints import save_params
from training.run.record import to_json, write_run_config

CheckpointFolder = Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
RunFolder = Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
TENSOR_DTYPES = "dtypes.json"
"""The file in RUN/huggingface with the original dtype of each tensor."""
_EVAL_SEQ_LEN = 2048  # unless the model's context is shorter


def import_checkpoint(source: CheckpointFolder, run: RunFolder, *, packed: bool = False) -> str:
    """Imports a Hugging Face checkpoint as a run; returns a summary and the next command, in two lines.

    Args:
      source: the checkpoint's folder: config.json, and safetensors in float32, bfloat16 or float16, or with
        linear layers in MXFP4 or NVFP4 as compressed-tensors packs them, or in MXFP4 as Quark does.
      run: the folder to create.
      packed: keep linear layers in MXFP4 as they are, of 4.25 bits a weight, for train.py --lora. Only layers
        that all blocks have in MXFP4 are; experts and all else are in float32.
    Raises:
      ValueError: `run` is in use, or the checkpoint is of another architecture, incomplete or damaged, or has
        nothing that can stay packed.
    """
    source, run = absolute_path(source), absolute_path(run)
    kept_files = small_files(source)
    raw = read_json(source / "config.json")
    if "config" in raw and "model_type" not in raw:
        raise ValueError(
            f"{source} is a run, not a Hugging Face checkpoint: train.py --init and eval.py take it"
        )
    layout = layout_of(raw)
    if layout is not None:
        raw.pop("quantization_config")
    config = read_config(raw)
    with new_folder(run) as folder:
        with Reader(source) if layout is None else PackedReader(source, layout) as reader:
            params, dtypes = read_params(reader, config, keeps_packed=packed)
        save_params(folder / "checkpoints", params)
        kept = folder / HUGGINGFACE
        kept.mkdir()
        for file in kept_files:
            shutil.copyfile(file, kept / file.name)
        if layout is not None:
            write_json(kept / "config.json", raw)
        write_json(kept / TENSOR_DTYPES, dtypes)
        values = {
            "config": to_json(_evaluation_config(config, raw)),
            "model": to_dict(config),
            "imported": str(source),
        }
        write_run_config(folder, values)
    return import_in_words(run, config, packed=packed)


def _evaluation_config(model: DecoderConfig, raw: Mapping[str, Any]) -> Config:
    """Returns the configuration in which eval.py runs an imported model by default."""
    seq_len = min(raw.get("max_position_embeddings") or _EVAL_SEQ_LEN, _EVAL_SEQ_LEN)
    data = DataConfig(vocab_size=model.vocab_size, batch_size=1, seq_len=seq_len)
    return Config(precision=PrecisionConfig("bf16"), data=data, model=name_of(model))
