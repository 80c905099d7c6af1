"""The export of a run for transformers, and for the servers that read its format."""

import importlib
import pathlib
import shutil
import sys
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from models import decoder
from models.configs import DecoderConfig
from models.huggingface.architectures import views
from models.huggingface.config import write_config
from models.huggingface.files import Spec, Writer, new_folder, read_json, small_files, write_json
from models.huggingface.gguf_file import write_gguf
from models.huggingface.packed import Layout, PackedFormat, layout_for
from models.huggingface.peft import write_adapters
from models.huggingface.quantized import choose_operands, names_of, names_of_others, quantized_weights
from models.huggingface.weights import as_written, check_finite, progress, specs_of
from models.lora import merged
from models.received import read_text
from mxjax import Operand
from mxjax.numerics.scales import ScaleRule
from training.files import HUGGINGFACE, absolute_path
from training.flags.ranges import Range, check_ranges
from training.huggingface import PROGRAM
from training.huggingface.calibration import largest_inputs
from training.huggingface.importing import TENSOR_DTYPES, CheckpointFolder, RunFolder
from training.huggingface.model_card import (
    EndToken,
    adapters_in_words,
    end_token,
    export_in_words,
    model_card,
)
from training.log.metrics import best_step
from training.optimizer.delayed import without_histories
from training.phases import from_record, phase_at
from training.process.start import check_extra
from training.run.checkpoints import Checkpoints, Weights
from training.run.checksums import saved_steps
from training.run.frozen import restore_weights
from training.run.record import from_json, model_of, read_run_config
from training.run.tokens import find_tokenizer

Quantization = PackedFormat | Literal["gguf"]
"""How --quantize stores linear layers."""
# In 10**9 bytes; the largest size of a file on Linux is 9.2e9 of them.
_SHARD_GB = Range("from 1e-9, a byte, to 1e9", lambda x: 1e-9 <= x <= 1e9)


def export_checkpoint(
    run: RunFolder,
    target: CheckpointFolder,
    *,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    step: int | Literal["best"] | None = None,
    weights: Weights | None = None,
    quantize: Quantization | None = None,
    scale_rule: ScaleRule | None = None,
    activations: bool = False,
    calibrate: str | None = None,
    chat_template: pathlib.Path | None = None,
    adapters: bool = False,
    shard_gb: float | None = None,
    allow_nonfinite: bool = False,
) -> str:
    """Exports a run for transformers; returns a summary and the next command, in two lines.

    Args:
      run: the run's folder.
      target: the folder to create.
      dtype: dtype of the weights that are not quantized. Default: as each tensor was imported, or float32,
        which loses nothing; with --quantize bfloat16, the only one that loaders then take.
      step: the checkpoint's step, or best by the evaluation loss of the weights. Default: the last.
      weights: ema: the average of the parameters that --ema keeps, instead of them.
      quantize: store linear layers in MXFP4, as compressed-tensors ("mxfp4") or AMD Quark ("quark") do, or in
        one file for llama.cpp ("gguf"); or in NVFP4, as compressed-tensors does. The layers and values are
        those that the run's Fprop multiplies; merged adapters are rounded with the weights. Of gpt-oss
        "mxfp4" packs the experts, as OpenAI does.
      scale_rule: round the weights to MXFP4 by this rule, to nearest, instead of as the Fprop does.
      activations: consumers round activations to the same format too; needs --quantize.
      calibrate: text or dataset PREFIX on which the model runs, for the scales of activations in NVFP4.
      chat_template: a Jinja file with the model's chat template.
      adapters: write the adapters of --lora alone, as PEFT does, and not the weights with them merged.
      shard_gb: largest size of a file's tensors, in 10**9 bytes. Default: 5.
      allow_nonfinite: also write weights that are NaN or infinite.
    Raises:
      ValueError: no such run or step, `target` is in use, the weights do not fit the requested format, or
        they are not finite; or the tokenizer is not the run's.
    """
    check_ranges({"shard_gb": shard_gb}, {"shard_gb": _SHARD_GB})
    run, target = absolute_path(run), absolute_path(target)
    calibrate = calibrate and str(absolute_path(calibrate))
    template = chat_template and _template(absolute_path(chat_template))
    _check_format_flags(quantize, dtype, scale_rule, activations, calibrate, shard_gb)
    saved = read_run_config(run)
    config = model_of(saved)
    if adapters and (saved["config"].get("lora") is None or quantize or dtype or template):
        raise ValueError("--adapters is for runs with --lora; leave out --quantize, --dtype, --chat-template")
    steps = saved_steps(run / "checkpoints")
    step = best_step(run, steps, weights) if step == "best" else step
    at = max(steps, default=0) if step is None else step
    with new_folder(target) as folder:
        with Checkpoints(run / "checkpoints") as checkpoints:
            restored = restore_weights(run, from_json(saved["config"]), config, checkpoints, step, weights)
        params = jax.tree.map(np.asarray, merged(restored))
        check_finite(run, views(config, params), allow_nonfinite)
        if adapters:
            write_adapters(folder, config, restored, saved.get("imported"))
            return adapters_in_words(target, at)
        source = _Source(run, saved, config, params)
        packing = _choose_packing(source, at, quantize, scale_rule, calibrate)
        specs = specs_of(
            views(config, params), "bfloat16" if quantize else dtype, run / HUGGINGFACE / TENSOR_DTYPES
        )
        raw = _export_config(source, specs, packing, activations)
        _write_small_files(folder, source, raw)
        if template is not None:
            (folder / "chat_template.jinja").write_bytes(template)
        if quantize == "gguf":
            library, file = importlib.import_module("gguf"), folder / "model.gguf"
            write_gguf(library, file, config, params, packing.operands, raw)
        else:
            _write_weights(folder, source, specs, packing, int((shard_gb or 5.0) * 1e9))
        (folder / "README.md").write_text(model_card(run, saved, at, packing.line, weights))
    return export_in_words(target, config, at, packing.line)


class _Source(NamedTuple):
    run: pathlib.Path
    saved: dict[str, Any]
    config: DecoderConfig
    params: decoder.Params


class _Packing(NamedTuple):
    """How an export stores its linear layers.

    Attributes:
      layout: the format of packed tensors; None for a file of another kind, or without any.
      operands: how to quantize, by the names of our layers.
      line: what to say of the weights.
      inputs: the largest magnitude of each layer's input, if consumers need it.
    """

    layout: Layout | None
    operands: Mapping[str, Operand]
    line: str
    inputs: Mapping[str, float] | None


def _choose_packing(
    source: _Source,
    step: int,
    quantize: Quantization | None,
    scale_rule: ScaleRule | None,
    calibrate: str | None,
) -> _Packing:
    """Returns how `--quantize` stores a model, by the policies of a step; see `choose_operands`."""
    if quantize is None:
        return _Packing(None, {}, "not quantized", None)
    run, saved, config, params = source
    phases = from_record(saved)
    layers = without_histories(phase_at(phases, step).layers) if phases else None
    layout = layout_for(config, quantize)
    number = "mxfp4" if layout is None else layout.number
    adapted = saved["config"].get("lora") is not None
    if number == "nvfp4" and config.experts is not None:
        print(f"{PROGRAM}: warning: transformers drops the divisors of NVFP4 experts", file=sys.stderr)
    operands, line = choose_operands(config, layers, scale_rule, number, adapted)
    inputs = None if calibrate is None else largest_inputs(run, saved, config, params, layers, calibrate)
    return _Packing(layout, operands, line, inputs)


def _check_format_flags(
    quantize: str | None,
    dtype: str | None,
    scale_rule: ScaleRule | None,
    activations: bool,
    calibrate: str | None,
    shard_gb: float | None,
) -> None:
    """Raises ValueError for flags of an export that have no effect or cannot be."""
    if quantize is None and (scale_rule is not None or activations):
        raise ValueError("--scale-rule and --activations are for quantized weights; add --quantize mxfp4")
    if quantize is not None and dtype not in (None, "bfloat16"):
        raise ValueError(f"--dtype {dtype}: loaders compute quantized models in bfloat16; leave --dtype out")
    if quantize == "nvfp4" and scale_rule is not None:
        raise ValueError(f"--scale-rule {scale_rule} is for the scales of MXFP4; leave it out with nvfp4")
    if (quantize == "nvfp4" and activations) != (calibrate is not None):
        raise ValueError(
            "--quantize nvfp4 --activations stores scales of activations: add --calibrate PREFIX, data on "
            "which the model runs; nothing else takes --calibrate"
        )
    if quantize == "gguf" and activations:
        raise ValueError("--activations is not for --quantize gguf: llama.cpp rounds activations to 8 bits")
    if quantize == "gguf" and shard_gb is not None:
        raise ValueError(f"--shard-gb {shard_gb:g}: --quantize gguf writes one file; leave it out")
    if quantize == "gguf":
        check_extra("serving", "--quantize gguf", "gguf")


def _template(path: pathlib.Path) -> bytes:
    """Returns the chat template in a file, in UTF-8; raises ValueError if it holds none."""
    name = f"--chat-template {path}"
    if path.is_dir() or not path.exists():
        raise ValueError(f"{name}: no such file")
    return read_text(path, name).encode()


def _write_weights(
    folder: pathlib.Path, source: _Source, specs: Mapping[str, Spec], packing: _Packing, largest: int
) -> None:
    """Writes all tensors, those of the packing packed, with the divisors of its inputs if there are any."""
    _, _, config, params = source
    layout, operands, _, inputs = packing
    packed = set(names_of(config, operands))
    of_inputs = {name: amax for layer, amax in (inputs or {}).items() for name in names_of(config, [layer])}
    written: dict[str, Spec] = {}
    for name, spec in specs.items():
        module = name.removesuffix(".weight")
        if layout is None or module not in packed:
            written[name] = spec
        else:
            written |= layout.specs(module, spec.shape, inputs=inputs is not None)
    with Writer(folder, written, largest) as writer:
        for name, view in progress(views(config, params), "exporting"):
            if name.removesuffix(".weight") not in packed:
                writer.write(name, as_written(name, view, specs[name]))
        if layout is None:
            return
        for module, weight in quantized_weights(config, params, operands):
            for name, value in layout.tensors(module, weight, of_inputs.get(module)).items():
                writer.write(name, value)


def _write_small_files(folder: pathlib.Path, source: _Source, raw: dict[str, Any]) -> None:
    """Writes config.json, and what an imported checkpoint or the data's tokenizer brings."""
    run, saved, config, _ = source
    data = saved["config"]["data"]["data"]
    if (run / HUGGINGFACE).exists():
        for file in small_files(run / HUGGINGFACE):
            if file.name != TENSOR_DTYPES:
                shutil.copyfile(file, folder / file.name)
    end = end_token(data, config.vocab_size)
    if end is not None and raw.get("eos_token_id") is None:
        ids = {"bos_token_id": end.id, "eos_token_id": end.id}
        raw |= ids
        generation = folder / "generation_config.json"
        write_json(generation, (read_json(generation) if generation.exists() else {}) | ids)
    _add_tokenizer(folder, source, end)
    write_json(folder / "config.json", raw)


def _export_config(
    source: _Source, specs: Mapping[str, Spec], packing: _Packing, activations: bool
) -> dict[str, Any]:
    """Returns the imported config.json, or a new one, with the dtype and the format of the weights."""
    run, saved, config, _ = source
    kept = run / HUGGINGFACE / "config.json"
    raw = read_json(kept) if kept.exists() else write_config(config, saved["config"]["data"]["seq_len"])
    raw.pop("quantization_config", None)  # the parameters are not packed
    field = "dtype" if "dtype" in raw else "torch_dtype"  # transformers 5 and 4
    raw[field] = specs["model.embed_tokens.weight"].numpy_dtype.name
    if packing.layout is not None:
        others = names_of_others(config, packing.operands)
        raw |= {"quantization_config": packing.layout.configuration(others, activations=activations)}
    return raw


def _add_tokenizer(folder: pathlib.Path, source: _Source, end: EndToken | None) -> None:
    """Copies the tokenizer of a run's training data, if there is one and the folder has none.

    Raises:
      ValueError: the tokenizer has other tokens than those that the run was trained on.
    """
    run, saved, *_ = source
    found, paths = find_tokenizer(run, saved["config"]["data"]["data"])
    if (folder / "tokenizer.json").exists():
        return
    if found is not None:
        shutil.copyfile(found, folder / "tokenizer.json")
        named = {} if end is None or end.text is None else {"bos_token": end.text, "eos_token": end.text}
        write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **named})
    elif saved.get("tokenizer") is not None:
        where = " or ".join(map(str, paths))
        print(f"{PROGRAM}: warning: no tokenizer is exported: it must lie at {where}", file=sys.stderr)
