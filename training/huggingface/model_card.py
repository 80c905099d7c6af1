"""Texts about an import and an export: a line and a command, the model card, the end token."""

import pathlib
import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple

from models.configs import DecoderConfig
from models.huggingface.architectures import ARCHITECTURES, model_type
from models.received import read_json
from training.command_line import command_of
from training.data.megatron import is_indexed
from training.data.text import END_OF_DOCUMENT, VOCAB_SIZE
from training.log.metrics import evaluations
from training.run.checkpoints import Weights
from training.run.record import from_json, model_of
from training.run.tokens import how_to_tokenize, own_tokenizer


class EndToken(NamedTuple):
    """The token that ends and separates documents; its text is None for bytes, which have no tokenizer."""

    id: int
    text: str | None


def end_token(data: Sequence[str], vocab_size: int) -> EndToken | None:
    """Returns the token that ends the documents of a run's data; None if there is none or that is unknown."""
    if not is_indexed(data):
        return EndToken(END_OF_DOCUMENT, None) if vocab_size == VOCAB_SIZE else None
    for prefix in data:
        record = pathlib.Path(f"{prefix}.json")
        if not record.exists():
            continue
        try:
            found = read_json(record)
        except ValueError as error:
            raise ValueError(f"{error}; or tokenize the data again") from None
        eod = found.get("eod_id") if isinstance(found, dict) else None
        if isinstance(eod, int) and 0 <= eod < vocab_size:
            return EndToken(eod, found.get("eod"))
    return None


def import_in_words(run: pathlib.Path, model: DecoderConfig, *, packed: bool) -> str:
    """Returns two lines for the terminal: the imported model and its run, and the command that trains it.

    Packed weights are trained by adapters.
    """
    tokenizer = own_tokenizer(run)
    first = "" if tokenizer is None else f"take text and {how_to_tokenize(tokenizer)}; then "
    how = "--lora 16 --lr 1e-4" if packed else "--lr 2e-5"
    train = f"python train.py --init {shlex.quote(str(run))} --data PREFIX {how} --out OUT"
    return f"imported {_in_words(model)} as {run}\n{first}train it: {train}"


def export_in_words(folder: pathlib.Path, model: DecoderConfig, step: int, stored: str) -> str:
    """Returns two lines for the terminal: the exported model and its folder, and a command that loads it."""
    path = shlex.quote(str(folder))
    if (folder / "model.gguf").exists():
        then = f"serve it: llama-server -m {path}/model.gguf"
    elif (folder / "tokenizer.json").exists():
        then = f"serve it: vllm serve {path}"
    else:  # no server takes bytes
        then = f"load it: transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})"
    return f"exported step {step:,} as {folder}: {_in_words(model)}; {stored}\n{then}"


def adapters_in_words(folder: pathlib.Path, step: int) -> str:
    """Returns that adapters were exported, and how to load them, in two lines."""
    then = f"peft.PeftModel.from_pretrained(MODEL, {str(folder)!r})"
    return f"exported the adapters of step {step:,} as {folder}\nload them: {then}"


def _in_words(model: DecoderConfig) -> str:
    name = ARCHITECTURES[model_type(model)].name
    return (
        f"{name} with {model.n_params:,} parameters, {model.n_layers} blocks of width {model.d_model:,} and "
        f"{model.vocab_size:,} tokens"
    )


def model_card(
    run: pathlib.Path, saved: dict[str, Any], step: int, stored: str, weights: Weights | None = None
) -> str:
    """Returns README.md of an export: data, policy, tokens, loss, versions, commit and command.

    Args:
      stored: how the weights are stored.
      weights: which weights; the loss is theirs.
    """
    config, data = from_json(saved["config"]), saved.get("data", {})
    losses = {at: loss for at, loss in evaluations(run, weights).items() if at <= step}
    averaged = "" if weights is None else f"average over the steps (--ema {config.optimizer.ema}), "
    tokens = step * config.data.batch_size * config.data.seq_len
    environment = saved.get("environment", {})
    rows = {
        "Data": data.get("source"),
        "Imported from": pathlib.Path(saved["imported"]).name if "imported" in saved else None,
        "Policy": config.precision.label,
        "Tokens trained on": f"{tokens:,}, {step:,} steps" if step else None,
        "Validation loss before export": f"{losses[max(losses)]:.4f} at step {max(losses):,}"
        if losses
        else None,
        "Weights": averaged + stored,
        "mxjax": environment.get("mxjax"),
        "Commit": environment.get("commit"),
        "JAX": environment.get("jax"),
        "Device": environment.get("device"),
        "Command": f"`{command_of(config, 'RUN')}`" if step else None,
    }
    shown = {name: str(value).replace("|", " ") for name, value in rows.items() if value is not None}
    lines = [f"| {name} | {value} |" for name, value in shown.items()]
    front = "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [mxjax]\n---\n"
    title = f"# {ARCHITECTURES[model_type(model_of(saved))].name} trained with mxjax"
    return front + "\n".join([title, "", "| | |", "| --- | --- |", *lines]) + "\n"
