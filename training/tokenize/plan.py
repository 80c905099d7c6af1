"""A tokenization's configuration, and the plan that a continued run must have."""

import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Annotated, Any, Literal

import tyro

from models.received import read_object
from training.data.tokenizer import END_OF_DOCUMENT, end_of_document, load_tokenizer
from training.files import make_absolute, write_atomically
from training.flags.ranges import at_most, check_ranges
from training.tokenize import workers
from training.tokenize.documents import WRITTEN

TOKENIZER_SUMS = "tokenizer.checksums.json"
"""Checksums of a trained tokenizer, in PREFIX.partial."""
# With more, the package tokenizers starts as many threads, and takes memory for as many tokens, at once.
_RANGES = {"workers": at_most(1024), "vocab_size": at_most(2**24), "train_characters": at_most(2**62)}


@dataclasses.dataclass(frozen=True)
class TokenizeConfig:
    """Input, tokenizer and output of a tokenization."""

    input: tuple[str, ...]
    """Files, patterns or folders: .json and .jsonl (a document a line), .txt, .md, .py and other text (a
    document a file), all also with .gz or .zst, and .parquet (a document a row). What a tokenization wrote is
    left out of patterns and folders."""
    output: str
    """PREFIX of the files to write."""
    tokenizer: pathlib.Path | None = None
    """A tokenizer.json of the package tokenizers. With --train-tokenizer: where to write a copy."""
    train_tokenizer: bool = False
    """Train a byte-level BPE on the input first."""
    vocab_size: int | None = None
    """Vocabulary of the tokenizer to train. Default: 32,000."""
    train_characters: int = 2_000_000_000
    """Characters to train the tokenizer on, an equal share from the start of each file."""
    append_eod: bool = False
    """End each document with the token --eod."""
    eod: str | None = None
    """Token that ends a document. Default: the tokenizer's <|endoftext|>, <|end_of_text|>, </s> or <eos>."""
    special_tokens: Literal["escape", "allow"] = "escape"
    """Encode a text that spells a special token, such as <|endoftext|>, as ordinary tokens, or as that token.
    PREFIX.json counts such texts."""
    field: Annotated[str, tyro.conf.arg(aliases=["--column"])] = "text"
    """Field, or column of parquet files, that holds the text."""
    recursive: bool = False
    """Also take files in folders of --input's folders, but not in hidden ones and links."""
    workers: int | None = None
    """Processor cores to use. Default: all."""

    def __post_init__(self):
        if os.path.basename(self.output) in ("", ".", ".."):
            raise ValueError(
                f"--output names files, as PREFIX.bin, and {self.output!r} is a folder: add a name to it"
            )
        make_absolute(self, "input", "output")


def check_config(config: TokenizeConfig) -> None:
    """Raises ValueError if flags contradict each other, or a number is out of its range."""
    if config.train_tokenizer is False and (config.tokenizer is None or config.vocab_size is not None):
        raise ValueError("give --tokenizer FILE, or train one with --train-tokenizer [--vocab-size N]")
    if config.eod is not None and not config.append_eod:
        raise ValueError("--eod names the token that --append-eod appends: give both")
    if config.train_tokenizer and config.eod not in (None, END_OF_DOCUMENT):
        raise ValueError(
            f"--eod {config.eod!r}: documents end with {END_OF_DOCUMENT} in a tokenizer that "
            "--train-tokenizer makes; leave --eod out"
        )
    check_ranges(vars(config), _RANGES)


def plan_of(config: TokenizeConfig, files: list[str]) -> dict[str, Any]:
    """Returns everything that the result depends on; a continued run must have the same plan."""
    training = config.train_tokenizer
    given = b"" if training else given_tokenizer(config)
    return {
        "input": [[path, os.path.getsize(path), os.stat(path).st_mtime_ns] for path in files],
        "tokenizer": None if training else hashlib.sha256(given).hexdigest(),
        "train": [config.vocab_size or 32_000, config.train_characters] if training else None,
        "append_eod": config.append_eod,
        "eod": config.eod,
        "special_tokens": config.special_tokens,
        "field": config.field,
    }


def finished(prefix: pathlib.Path, plan: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the record of this plan's dataset; None unless its files are there."""
    files = [beside(prefix, suffix) for suffix in (".json", ".bin", ".idx")]
    record = _read_object(files[0]) if all(file.exists() for file in files) else {}
    return record if record.get("plan") == plan else None


def _read_object(path: pathlib.Path) -> dict[str, Any]:
    """Returns the JSON object in a file; an empty one if it holds anything else."""
    try:
        return read_object(path)
    except ValueError:
        return {}


def check_free(config: TokenizeConfig, prefix: pathlib.Path) -> None:
    """Raises ValueError if a file is there that would be written, the given tokenizer's copy excepted."""
    taken = [path for path in written(prefix) if path.exists() and path != config.tokenizer]
    if config.train_tokenizer and config.tokenizer is not None and config.tokenizer.exists():
        taken.append(config.tokenizer)
    if taken:
        raise ValueError(f"{', '.join(map(str, taken))} exist already; remove them, or choose another name")


def check_no_folders(config: TokenizeConfig, prefix: pathlib.Path) -> None:
    """Raises ValueError if a folder lies where a file would be written."""
    made = written(prefix)
    if config.train_tokenizer and config.tokenizer is not None:
        made.append(config.tokenizer)
    for path in made:
        if path.is_dir():
            raise ValueError(f"{path} is a folder: move it away, or name another --output or --tokenizer")


def holds_work(folder: pathlib.Path) -> bool:
    """Returns whether an interrupted run has left a trained tokenizer or tokens."""
    return (folder / TOKENIZER_SUMS).exists() or workers.have_tokens(folder)


def check_plan(folder: pathlib.Path, plan: dict[str, Any]) -> None:
    """Writes the plan into a new folder; raises ValueError if the folder holds the work of another plan."""
    path = folder / "plan.json"
    if not path.exists():
        write_atomically(path, json.dumps(plan))
    saved = _read_object(path)
    if saved.keys() != plan.keys():
        raise ValueError(f"{path} is damaged: remove {folder} to start over")
    different = [name for name in plan if saved[name] != plan[name]]
    if different and not holds_work(folder):
        workers.remove(folder)  # made from files in which nothing was found
        write_atomically(path, json.dumps(plan))
    elif different:
        raise ValueError(
            f"{folder} holds an interrupted run that differs in {', '.join(different)}: repeat its "
            "command to continue it, or remove the folder to start over"
        )


def given_tokenizer(config: TokenizeConfig) -> bytes:
    """Returns the bytes of --tokenizer; raises ValueError if it is none, or lacks the token to append."""
    path = config.tokenizer or pathlib.Path()
    tokenizer = load_tokenizer(path)
    if config.append_eod:
        end_of_document(tokenizer, config.eod)
    return path.read_bytes()


def written(prefix: pathlib.Path) -> list[pathlib.Path]:
    """Returns the paths of the files that a tokenization writes, not all of which every one does."""
    return [beside(prefix, suffix) for suffix in WRITTEN]


def beside(prefix: pathlib.Path, suffix: str) -> pathlib.Path:
    """Returns the path of the prefix with this suffix."""
    return prefix.with_name(prefix.name + suffix)
