"""Whether data is that of a run: the same as it began with, and tokens of the same tokenizer."""

import json
import pathlib
import shlex
from collections.abc import Mapping
from typing import Any

from training.data.megatron import is_indexed, parse_blend
from training.data.text import VOCAB_SIZE
from training.data.tokenizer import tokenizer_path
from training.resume import begun_run
from training.run_config import model_of, read_run_config


def check_same_data(folder: pathlib.Path, facts: Mapping[str, Any]) -> None:
    """Raises ValueError if the run in `folder` began with data of other facts, wherever it lies."""
    began_with = read_run_config(folder).get("data", facts)
    if not _same(began_with, facts):
        raise ValueError(
            f"--resume: the data is {_in_words(facts)}, but the run began with {_in_words(began_with)}; put "
            "that data back, or begin a run with --init on the new one"
        )


def changed_data(folder: pathlib.Path, facts: Mapping[str, Any]) -> str | None:
    """Returns a line if the data of the run in `folder` is not what it was trained on, wherever it lies."""
    began_with = read_run_config(folder).get("data", facts)
    if _same(began_with, facts):
        return None
    return (
        f"the data of {folder} is now {_in_words(facts)}, and the run was trained on "
        f"{_in_words(began_with)}. What is evaluated may have been trained on: put that data back, or name "
        "other data with --eval-data"
    )


def _same(began_with: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    return {**began_with, "source": None} == {**facts, "source": None}


def check_tokens_of(run: pathlib.Path, flag: str, path: str) -> None:
    """Raises ValueError if `path` is text, and the run was trained on tokenized data or that is unknown."""
    begun = begun_run(run)
    if begun is None or not begun.data.data or is_indexed([path]) or not pathlib.Path(path).exists():
        return
    text, first = f"{flag} {path} is text, which is read as bytes", parse_blend(begun.data.data)[0][0]
    if is_indexed(begun.data.data):
        files = f"--input {shlex.quote(path)} --tokenizer {shlex.quote(str(tokenizer_path(first)))}"
        raise ValueError(
            f"{text}, and {run} was trained on tokens of {first}; tokenize it likewise: "
            f"python -m training.tokenize {files} --output PREFIX"
        )
    if not pathlib.Path(first).exists() and model_of(read_run_config(run)).vocab_size != VOCAB_SIZE:
        raise ValueError(
            f"{text}, and {first}, which {run} was trained on, is gone, so that its tokens are unknown; "
            "put it back, or of a dataset its .idx"
        )


def check_tokenizer_of(run: pathlib.Path, flag: str, path: str) -> None:
    """Raises ValueError if a tokenizer with other tokens made the dataset `path` than the run's data."""
    begun, theirs = begun_run(run), tokenizer_path(path)
    if begun is None or not is_indexed([path]) or not is_indexed(begun.data.data) or not theirs.exists():
        return
    paths = map(tokenizer_path, parse_blend(begun.data.data)[0])
    ours = next((path for path in paths if path.exists()), None)
    if ours is not None and _tokens(ours) != _tokens(theirs):
        raise ValueError(
            f"{flag} {path} was tokenized by {theirs}, and {run} was trained on tokens of {ours}; tokenize "
            f"the text again with --tokenizer {shlex.quote(str(ours))}"
        )


def _tokens(tokenizer: pathlib.Path) -> Any:
    """Returns the vocabulary and the merges of a tokenizer.json, as any version of tokenizers writes them."""
    model = json.loads(tokenizer.read_text())["model"]
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges", ())]
    return model["vocab"], merges


def _in_words(facts: Mapping[str, Any]) -> str:
    sizes = f"{facts['train_tokens']:,} + {facts['validation_tokens']:,} tokens"
    return f"{facts['source']} with {sizes}, crc32 {facts['crc32']}"
