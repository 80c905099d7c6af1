"""Tokenization of text into a Megatron indexed dataset, in parallel, for `python -m training.tokenize`."""

import collections
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Any

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from training.data.indexed_dataset import IndexedWriter, token_dtype
from training.data.tokenizer import (
    END_OF_DOCUMENT,
    end_of_document,
    load_tokenizer,
    tokenizer_path,
    tokenizer_vocab_size,
)
from training.environment import input_errors
from training.files import write_atomically
from training.flags import flags
from training.integrity import problem, read_checked, size_and_crc32, to_checked
from training.startup import cores, output_errors, unwinding_signals
from training.tokenize import workers
from training.tokenize.documents import find_files
from training.tokenize.train_tokenizer import train_tokenizer

_WRITTEN = (".bin", ".idx", ".json", ".tokenizer.json", ".problems.txt")
_TOKENIZER_SUMS = "tokenizer.checksums.json"  # in PREFIX.partial
_SHOWN = 20  # problems printed; PREFIX.problems.txt has all
# With more, the package tokenizers starts as many threads, and takes memory for as many tokens, at once.
_LARGEST = {"workers": 1024, "vocab_size": 2**24, "train_characters": 2**62}


@dataclasses.dataclass(frozen=True)
class TokenizeConfig:
    """Input, tokenizer and output of a tokenization."""

    input: tuple[str, ...]
    """Files, patterns or folders: .json.gz, .jsonl.gz, .json and .jsonl (a document a line), .txt and .txt.gz
    (a document a file), .parquet (a document a row)."""
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
    field: str = "text"
    """Field or column that holds the text."""
    workers: int | None = None
    """Processor cores to use. Default: all."""


def tokenize(config: TokenizeConfig) -> dict[str, Any]:
    """Tokenizes, or continues where an interrupted run ended; returns the record in PREFIX.json.

    Raises:
      ValueError: the input cannot be read, or PREFIX is in use; the message says what to do.
      MissingExtraError: the package tokenizers is not installed.
    """
    _check(config)
    files = find_files(config.input)
    plan = _plan(config, files)
    prefix = pathlib.Path(config.output)
    folder = _beside(prefix, ".partial")
    if _is_done(prefix, plan):
        print(f"{prefix} exists already: nothing to do")
        shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed at its very end
        return json.loads(_beside(prefix, ".json").read_text())
    _check_no_folders(config, prefix)
    if not _holds_work(folder):
        _check_free(config, prefix)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder, prefix):
        _check_plan(folder, plan)
        path = _tokenizer(config, folder, files)
        tokenizer = load_tokenizer(path)
        name, eod = end_of_document(tokenizer, config.eod) if config.append_eod else (None, None)
        size = tokenizer_vocab_size(path)
        n_workers = config.workers or cores()
        processes = min(n_workers, len(files))
        job = workers.Job(
            folder, path, config.field, eod, token_dtype(size).name, max(n_workers // processes, 1)
        )
        made = _shards(job, files, processes)
        record = {"plan": plan, "vocab_size": size, "eod": name, "eod_id": eod, **_counts(made)}
        _write(prefix, job, made, record)
    shutil.rmtree(folder)
    return record


def _check(config: TokenizeConfig) -> None:
    if config.train_tokenizer is False and (config.tokenizer is None or config.vocab_size is not None):
        raise ValueError("give --tokenizer FILE, or train one with --train-tokenizer [--vocab-size N]")
    if config.eod is not None and not config.append_eod:
        raise ValueError("--eod names the token that --append-eod appends: give both")
    if config.train_tokenizer and config.eod not in (None, END_OF_DOCUMENT):
        raise ValueError(
            f"--eod {config.eod!r}: documents end with {END_OF_DOCUMENT} in a tokenizer that "
            "--train-tokenizer makes; leave --eod out"
        )
    for name, largest in _LARGEST.items():
        value = getattr(config, name)
        if value is not None and not 1 <= value <= largest:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} must be at least 1 and at most {largest:,}, got {value}")


def _plan(config: TokenizeConfig, files: list[str]) -> dict[str, Any]:
    """Returns everything that the result depends on; a continued run must have the same plan."""
    training = config.train_tokenizer
    given = b"" if training else _given_tokenizer(config)
    return {
        "input": [[path, os.path.getsize(path), os.stat(path).st_mtime_ns] for path in files],
        "tokenizer": None if training else hashlib.sha256(given).hexdigest(),
        "train": [config.vocab_size or 32_000, config.train_characters] if training else None,
        "append_eod": config.append_eod,
        "eod": config.eod,
        "field": config.field,
    }


def _is_done(prefix: pathlib.Path, plan: dict[str, Any]) -> bool:
    files = [_beside(prefix, suffix) for suffix in (".json", ".bin", ".idx")]
    return all(f.exists() for f in files) and _read_object(files[0]).get("plan") == plan


def _read_object(path: pathlib.Path) -> dict[str, Any]:
    """Returns the JSON object in a file; an empty one if it holds anything else."""
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _check_free(config: TokenizeConfig, prefix: pathlib.Path) -> None:
    """Raises ValueError if a file is there that would be written, the given tokenizer's copy excepted."""
    made = [_beside(prefix, suffix) for suffix in _WRITTEN]
    taken = [path for path in made if path.exists() and path != config.tokenizer]
    if config.train_tokenizer and config.tokenizer is not None and config.tokenizer.exists():
        taken.append(config.tokenizer)
    if taken:
        raise ValueError(f"{', '.join(map(str, taken))} exist already; remove them, or choose another name")


def _check_no_folders(config: TokenizeConfig, prefix: pathlib.Path) -> None:
    """Raises ValueError if a folder lies where a file would be written."""
    made = [_beside(prefix, suffix) for suffix in _WRITTEN]
    if config.train_tokenizer and config.tokenizer is not None:
        made.append(config.tokenizer)
    for path in made:
        if path.is_dir():
            raise ValueError(f"{path} is a folder: move it away, or name another --output or --tokenizer")


@contextlib.contextmanager
def _locked(folder: pathlib.Path, prefix: pathlib.Path) -> Iterator[None]:
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"--output {prefix}: another process is writing it") from error
        yield


def _holds_work(folder: pathlib.Path) -> bool:
    """Returns whether an interrupted run has left a trained tokenizer or tokens."""
    return (folder / _TOKENIZER_SUMS).exists() or workers.have_tokens(folder)


def _check_plan(folder: pathlib.Path, plan: dict[str, Any]) -> None:
    """Writes the plan into a new folder; raises ValueError if the folder holds the work of another plan."""
    path = folder / "plan.json"
    if not path.exists():
        write_atomically(path, json.dumps(plan))
    saved = _read_object(path)
    if saved.keys() != plan.keys():
        raise ValueError(f"{path} is damaged: remove {folder} to start over")
    different = [name for name in plan if saved[name] != plan[name]]
    if different and not _holds_work(folder):
        workers.remove(folder)  # made from files in which nothing was found
        write_atomically(path, json.dumps(plan))
    elif different:
        raise ValueError(
            f"{folder} holds an interrupted run that differs in {', '.join(different)}: repeat its "
            "command to continue it, or remove the folder to start over"
        )


def _tokenizer(config: TokenizeConfig, folder: pathlib.Path, files: list[str]) -> pathlib.Path:
    """Returns the run's copy of the tokenizer; trains it if there is none yet, or it was damaged since.

    Training gives the same bytes each time.
    """
    path = folder / "tokenizer.json"
    if not config.train_tokenizer:
        write_atomically(path, _given_tokenizer(config))
        return path
    record = read_checked(folder / _TOKENIZER_SUMS)
    if record is None or problem(path, record["tokenizer"]):
        start, size = time.monotonic(), config.vocab_size or 32_000
        write_atomically(path, train_tokenizer(files, config.field, size, config.train_characters))
        sums = to_checked({"tokenizer": size_and_crc32(path)})
        if record is not None and sums != to_checked(record):
            raise ValueError(
                f"{path} was damaged, and training gives another tokenizer than before: the input or the "
                f"version of tokenizers has changed; remove {folder} to start over"
            )
        write_atomically(folder / _TOKENIZER_SUMS, sums)
        made = tokenizer_vocab_size(path)
        fewer = "" if made == size else f", fewer than the {size:,} asked for: there is too little text"
        print(f"trained a tokenizer of {made:,} tokens in {time.monotonic() - start:.0f} s{fewer}")
    if config.tokenizer is not None:
        config.tokenizer.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(config.tokenizer, path.read_bytes())
    return path


def _given_tokenizer(config: TokenizeConfig) -> bytes:
    """Returns the bytes of --tokenizer; raises ValueError if it is none, or lacks the token to append."""
    path = config.tokenizer or pathlib.Path()
    tokenizer = load_tokenizer(path)
    if config.append_eod:
        end_of_document(tokenizer, config.eod)
    return path.read_bytes()


def _shards(job: workers.Job, files: list[str], processes: int) -> list[workers.Shard]:
    """Tokenizes the files that are not done; returns all shards in order, and shows progress and problems."""
    done, damaged = workers.finished(job.folder, files)
    for line in damaged:
        print(line)
    missing = [i for i in range(len(files)) if i not in done]
    if done:
        print(f"{len(done)} of {len(files)} files were done before")
    sizes = [os.path.getsize(path) for path in files]
    before = sum(sizes[i] for i in done)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=Console(highlight=False, soft_wrap=True),
        disable=not sys.stdout.isatty(),
    )
    task, start, shown = bar.add_task("starting", total=sum(sizes), completed=before), time.monotonic(), 0

    def show(read: int, tokens: int) -> None:
        speed = tokens / (time.monotonic() - start)
        bar.update(task, completed=before + read, description=f"{speed:,.0f} tokens/s")

    with bar:
        for shard in workers.make(job, files, missing, processes, show) if missing else ():
            done[shard.number] = shard
            line = f"{shard.path}: {shard.documents:,} documents, {shard.tokens:,} tokens"
            bar.console.print(line, markup=False)
            for line in _problem_lines(shard)[: _SHOWN - shown]:
                bar.console.print(line, markup=False)
                shown += 1
    return [done[i] for i in range(len(files))]


def _counts(made: list[workers.Shard]) -> dict[str, Any]:
    left_out = collections.Counter(problem.kind for shard in made for problem in shard.problems)
    return {
        "documents": sum(shard.documents for shard in made),
        "tokens": sum(shard.tokens for shard in made),
        "left_out": dict(sorted(left_out.items())),
    }


def _write(prefix: pathlib.Path, job: workers.Job, made: list[workers.Shard], record: dict[str, Any]) -> None:
    """Joins the shards; PREFIX.json comes last and marks the dataset as complete."""
    if not record["tokens"]:
        raise ValueError(f"--input: no file holds a document; see {job.folder} for the problems")
    with IndexedWriter(prefix, job.dtype) as writer:
        for shard in made:
            writer.add_file(workers.bin_path(job.folder, shard), workers.lengths(job.folder, shard))
    write_atomically(tokenizer_path(str(prefix)), job.tokenizer.read_bytes())
    problems = "".join(line + "\n" for shard in made for line in _problem_lines(shard))
    _beside(prefix, ".problems.txt").unlink(missing_ok=True)
    if problems:
        write_atomically(_beside(prefix, ".problems.txt"), problems)
    write_atomically(_beside(prefix, ".json"), json.dumps(record, indent=1) + "\n")


def _problem_lines(shard: workers.Shard) -> list[str]:
    return [f"{shard.path}:{p.line}: {p.kind}: {p.what}" for p in shard.problems]


def _beside(prefix: pathlib.Path, suffix: str) -> pathlib.Path:
    return prefix.with_name(prefix.name + suffix)


def summary(prefix: str, record: dict[str, Any]) -> str:
    """Returns the printed summary: documents, tokens and problems."""
    lines = [f"{prefix}: {record['documents']:,} documents, {record['tokens']:,} tokens"]
    if record["left_out"]:
        kinds = ", ".join(f"{count:,} x {kind}" for kind, count in record["left_out"].items())
        lines.append(f"skipped, see {prefix}.problems.txt: {kinds}")
    lines.append(f"train on it with: python train.py --data {shlex.quote(prefix)}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    program, description = "python -m training.tokenize", "Turn text into a Megatron indexed dataset."
    config = flags(
        lambda: tyro.cli(TokenizeConfig, args=argv, prog=program, description=description), program
    )
    with unwinding_signals("the same command continues where it ended"), input_errors():
        record = tokenize(config)
    with output_errors():
        print(summary(config.output, record))
