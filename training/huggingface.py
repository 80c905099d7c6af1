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
import importlib
import pathlib
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import jax
import numpy as np
import tyro

from models import decoder
from models.configs import DecoderConfig, name_of, to_dict
from models.huggingface.architectures import views
from models.huggingface.config import read_config, write_config
from models.huggingface.files import (
    Reader,
    Spec,
    Writer,
    new_folder,
    read_json,
    small_files,
    write_json,
)
from models.huggingface.gguf_file import write_gguf
from models.huggingface.packed import Layout, PackedFormat, PackedReader, layout_for, layout_of
from models.huggingface.peft import write_adapters
from models.huggingface.quantized import choose_operands, names_of, names_of_others, quantized_weights
from models.huggingface.weights import as_written, check_finite, dtype_field, progress, read_params, specs_of
from models.lora import merged
from models.received import read_text
from mxjax import Operand
from mxjax.numerics.scales import ScaleRule
from mxjax.policy.layers import LayerPolicies
from training.calibration import largest_inputs
from training.command_line import check_lists, flags
from training.config import Config, DataConfig, PrecisionConfig
from training.delayed import without_histories
from training.files import HUGGINGFACE, absolute_path
from training.flags.ranges import Range, check_ranges
from training.log.metrics import best_step
from training.model_card import (
    EndToken,
    adapters_in_words,
    end_token,
    export_in_words,
    import_in_words,
    model_card,
)
from training.phases import from_record, phase_at
from training.process.environment import input_errors, start_jax
from training.process.extras import check_extra
from training.process.start import output_errors, unwinding_signals
from training.run.checkpoints import Checkpoints, Weights, save_params
from training.run.checksums import saved_steps
from training.run.frozen import restore_weights
from training.run.record import (
    from_json,
    model_of,
    read_run_config,
    to_json,
    write_run_config,
)
from training.run.tokens import find_tokenizer

PROGRAM = "python -m training.huggingface"


def main() -> None:
    """Runs the command line."""
    jax.config.update("jax_platforms", "cpu")  # the weights need no accelerator
    commands = {"import": import_checkpoint, "export": export_checkpoint}
    if (command := commands.get("".join(sys.argv[1:2]))) is not None:
        check_lists(command, sys.argv, PROGRAM)
    later = {name: _later(command) for name, command in commands.items()}
    parse = tyro.extras.subcommand_cli_from_dict
    run = flags(lambda words: parse(later, args=words, prog=PROGRAM, description=__doc__), program=PROGRAM)
    with unwinding_signals(), input_errors():
        start_jax()
        said = run()
    with output_errors():
        print(said)


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
        write_json(kept / _TENSOR_DTYPES, dtypes)
        values = {
            "config": to_json(_evaluation_config(config, raw)),
            "model": to_dict(config),
            "imported": str(source),
        }
        write_run_config(folder, values)
    return import_in_words(run, config)


def export_checkpoint(
    run: RunFolder,
    target: CheckpointFolder,
    *,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    step: int | Literal["best"] | None = None,
    weights: Weights | None = None,
    quantize: PackedFormat | Literal["gguf"] | None = None,
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
        those that the run's Fprop multiplies. Of gpt-oss "mxfp4" packs the experts, as OpenAI does.
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
    if quantize == "gguf" and shard_gb is not None:
        raise ValueError(f"--shard-gb {shard_gb:g}: --quantize gguf writes one file; leave it out")
    _check_format_flags(quantize, dtype, scale_rule, activations, calibrate)
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
            write_adapters(folder, config, restored)
            return adapters_in_words(target, at)
        raw = _export_config(run / HUGGINGFACE / "config.json", saved, config)
        packing = _Packing(None, {}, "not quantized", None)
        if quantize is not None:
            dtype = "bfloat16"
            phases = from_record(saved)
            layers = without_histories(phase_at(phases, at).layers) if phases else None
            packing = _pack(config, layers, quantize, scale_rule)
            if calibrate is not None:
                inputs = largest_inputs(run, saved, config, params, layers, calibrate)
                packing = packing._replace(inputs=inputs)
        specs = specs_of(views(config, params), dtype, run / HUGGINGFACE / _TENSOR_DTYPES)
        raw |= {dtype_field(raw): specs["model.embed_tokens.weight"].numpy_dtype.name}
        if packing.layout is not None:
            others = names_of_others(config, packing.operands)
            raw |= {"quantization_config": packing.layout.configuration(others, activations=activations)}
        _write_small_files(folder, run, saved, raw, config)
        if template is not None:
            (folder / "chat_template.jinja").write_bytes(template)
        if quantize == "gguf":
            library, file = importlib.import_module("gguf"), folder / "model.gguf"
            write_gguf(library, file, config, params, packing.operands, raw)
        else:
            _write_weights(folder, config, params, specs, packing, int((shard_gb or 5.0) * 1e9))
        (folder / "README.md").write_text(model_card(run, saved, at, packing.line, weights))
    return export_in_words(target, config, at, packing.line)


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


def _pack(
    config: DecoderConfig,
    layers: LayerPolicies | None,
    quantize: PackedFormat | Literal["gguf"],
    scale_rule: ScaleRule | None,
) -> _Packing:
    """Returns how `--quantize` stores a model, without inputs; see `choose_operands`."""
    layout = layout_for(config, quantize)
    number = "mxfp4" if layout is None else layout.number
    if number == "nvfp4" and config.experts is not None:
        print(f"{PROGRAM}: warning: transformers drops the divisors of NVFP4 experts", file=sys.stderr)
    return _Packing(layout, *choose_operands(config, layers, scale_rule, number), None)


def _check_format_flags(
    quantize: str | None,
    dtype: str | None,
    scale_rule: ScaleRule | None,
    activations: bool,
    calibrate: str | None,
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
    if quantize == "gguf":
        check_extra("serving", "--quantize gguf", "gguf")


def _template(path: pathlib.Path) -> bytes:
    """Returns the chat template in a file, in UTF-8; raises ValueError if it holds none."""
    name = f"--chat-template {path}"
    if path.is_dir() or not path.exists():
        raise ValueError(f"{name}: no such file")
    return read_text(path, name).encode()


def _write_weights(
    folder: pathlib.Path,
    config: DecoderConfig,
    params: decoder.Params,
    specs: Mapping[str, Spec],
    packing: _Packing,
    largest: int,
) -> None:
    """Writes all tensors, those of the packing packed, with the divisors of its inputs if there are any."""
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


def _write_small_files(
    folder: pathlib.Path,
    run: pathlib.Path,
    saved: Mapping[str, Any],
    raw: dict[str, Any],
    config: DecoderConfig,
) -> None:
    """Writes config.json, and what an imported checkpoint or the data's tokenizer brings."""
    data = saved["config"]["data"]["data"]
    if (run / HUGGINGFACE).exists():
        for file in small_files(run / HUGGINGFACE):
            if file.name != _TENSOR_DTYPES:
                shutil.copyfile(file, folder / file.name)
    end = end_token(data, config.vocab_size)
    if end is not None and raw.get("eos_token_id") is None:
        ids = {"bos_token_id": end.id, "eos_token_id": end.id}
        raw |= ids
        generation = folder / "generation_config.json"
        write_json(generation, (read_json(generation) if generation.exists() else {}) | ids)
    _add_tokenizer(folder, run, saved, end)
    write_json(folder / "config.json", raw)


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


def _add_tokenizer(
    folder: pathlib.Path, run: pathlib.Path, saved: Mapping[str, Any], end: EndToken | None
) -> None:
    """Copies the tokenizer of a run's training data, if there is one and the folder has none.

    Raises:
      ValueError: the tokenizer has other tokens than those that the run was trained on.
    """
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


if __name__ == "__main__":
    main()
