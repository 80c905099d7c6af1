"""Tokenization of text into a Megatron indexed dataset, in parallel, and training of its tokenizer."""

import collections
import contextlib
import fcntl
import json
import os
import pathlib
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from training.command_line import flags_of
from training.data.indexed_dataset import IndexedWriter, token_dtype
from training.data.tokenizer import (
    END_OF_DOCUMENT,
    end_of_document,
    load_tokenizer,
    tokenizer_path,
    tokenizer_vocab_size,
    tokenizers_library,
)
from training.files import problem, read_checked, size_and_crc32, to_checked, write_atomically
from training.process.environment import input_errors
from training.process.start import cores, output_errors, unwinding_signals
from training.tokenize import workers
from training.tokenize.documents import Documents, Problem, below, check_columns, find_files
from training.tokenize.plan import (
    TOKENIZER_SUMS,
    TokenizeConfig,
    beside,
    check_config,
    check_free,
    check_no_folders,
    check_plan,
    finished,
    given_tokenizer,
    holds_work,
    plan_of,
    written,
)

_SHOWN = 20  # problems printed; PREFIX.problems.txt has all


def tokenize(config: TokenizeConfig) -> dict[str, Any]:
    """Tokenizes, or continues where an interrupted run ended; returns the record in PREFIX.json.

    Raises:
      ValueError: the input cannot be read, or PREFIX is in use; the message says what to do.
      MissingExtraError: the package tokenizers is not installed.
    """
    check_config(config)
    prefix = pathlib.Path(config.output)
    own = set(map(str, written(prefix)))  # they may lie in a folder of the input
    files = [path for path in find_files(config.input, recursive=config.recursive) if path not in own]
    if deeper := sorted(set(below(config.input)) - set(files)):
        print(f"left out: {len(deeper)} files in folders, such as {deeper[0]}; --recursive takes them")
    check_columns(files, config.field)
    plan = plan_of(config, files)
    folder = beside(prefix, ".partial")
    if (record := finished(prefix, plan)) is not None:
        print(f"{prefix} exists already: nothing to do")
        shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed at its very end
        return record
    check_no_folders(config, prefix)
    if not holds_work(folder):
        check_free(config, prefix)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder, prefix):
        check_plan(folder, plan)
        with _removed_without_work(folder):
            path = _tokenizer(config, folder, files)
        tokenizer = load_tokenizer(path)
        name, eod = end_of_document(tokenizer, config.eod) if config.append_eod else (None, None)
        size = tokenizer_vocab_size(path)
        n_workers = config.workers or cores()
        processes = min(n_workers, len(files))
        job = workers.Job(
            folder,
            path,
            config.field,
            eod,
            config.special_tokens == "escape",
            token_dtype(size).name,
            max(n_workers // processes, 1),
        )
        made = _shards(job, files, processes)
        record = {"plan": plan, "vocab_size": size, "eod": name, "eod_id": eod, **_counts(made)}
        _write(prefix, job, made, record)
    shutil.rmtree(folder)
    return record


@contextlib.contextmanager
def _locked(folder: pathlib.Path, prefix: pathlib.Path) -> Iterator[None]:
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"--output {prefix}: another process is writing it") from error
        yield


@contextlib.contextmanager
def _removed_without_work(folder: pathlib.Path) -> Iterator[None]:
    """Removes the folder if an error ends the block before there is work to continue."""
    try:
        yield
    except ValueError:
        if not holds_work(folder):
            shutil.rmtree(folder)
        raise


def _tokenizer(config: TokenizeConfig, folder: pathlib.Path, files: list[str]) -> pathlib.Path:
    """Returns the run's copy of the tokenizer; trains it if there is none yet, or it was damaged since.

    Training gives the same bytes each time.
    """
    path = folder / "tokenizer.json"
    if not config.train_tokenizer:
        write_atomically(path, given_tokenizer(config))
        return path
    record = read_checked(folder / TOKENIZER_SUMS)
    if record is None or problem(path, record["files"].get(path.name, (0, ""))):
        start, size = time.monotonic(), config.vocab_size or 32_000
        write_atomically(path, train_tokenizer(files, config.field, size, config.train_characters))
        sums = to_checked({"files": {path.name: size_and_crc32(path)}})
        if record is not None and sums != to_checked(record):
            raise ValueError(
                f"{path} was damaged, and training gives another tokenizer than before: the input or the "
                f"version of tokenizers has changed; remove {folder} to start over"
            )
        write_atomically(folder / TOKENIZER_SUMS, sums)
        made = tokenizer_vocab_size(path)
        fewer = "" if made == size else f", fewer than the {size:,} asked for: there is too little text"
        print(f"trained a tokenizer of {made:,} tokens in {time.monotonic() - start:.0f} s{fewer}")
    if config.tokenizer is not None:
        config.tokenizer.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(config.tokenizer, path.read_bytes())
    return path


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
            line = f"{shard.path}: {_size(shard.documents, shard.tokens)}"
            bar.console.print(line, markup=False)
            for line in _problem_lines(shard)[: _SHOWN - shown]:
                bar.console.print(line, markup=False)
                shown += 1
    return [done[i] for i in range(len(files))]


def _counts(made: list[workers.Shard]) -> dict[str, Any]:
    spelled = sum((collections.Counter(shard.spelled) for shard in made), collections.Counter[str]())
    left_out = collections.Counter(problem.kind for shard in made for problem in shard.problems)
    return {
        "documents": sum(shard.documents for shard in made),
        "tokens": sum(shard.tokens for shard in made),
        "left_out": dict(sorted(left_out.items())),
        "spelled": dict(sorted(spelled.items())),
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
    beside(prefix, ".problems.txt").unlink(missing_ok=True)
    if problems:
        write_atomically(beside(prefix, ".problems.txt"), problems)
    write_atomically(beside(prefix, ".json"), json.dumps(record, indent=1) + "\n")


def _size(documents: int, tokens: int) -> str:
    return f"{documents:,} document{'s' * (documents != 1)}, {tokens:,} token{'s' * (tokens != 1)}"


def _problem_lines(shard: workers.Shard) -> list[str]:
    return [f"{shard.path}:{p.line}: {p.kind}: {p.what}" for p in shard.problems]


def summary(prefix: str, record: dict[str, Any]) -> str:
    """Returns the printed summary: documents, tokens and problems."""
    lines = [f"{prefix}: {_size(record['documents'], record['tokens'])}"]
    if record["left_out"]:
        kinds = ", ".join(f"{count:,} x {kind}" for kind, count in record["left_out"].items())
        lines.append(f"skipped, see {prefix}.problems.txt: {kinds}")
    if record["spelled"]:
        names = ", ".join(
            f"{name} in {count:,} text{'s' * (count > 1)}" for name, count in record["spelled"].items()
        )
        became = {"escape": "ordinary tokens", "allow": "the special token"}[record["plan"]["special_tokens"]]
        lines.append(f"special tokens spelled in text, and encoded as {became}: {names}")
    return "\n".join(lines)


def advice(prefix: str) -> str:
    """Returns the command that trains on an output."""
    return f"train on it with: {shlex.join(['python', 'train.py', '--data', prefix])}"


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    program, description = "python -m training.tokenize", "Turn text into a Megatron indexed dataset."
    config = flags_of(TokenizeConfig, argv, program, prog=program, description=description)
    prefix = pathlib.Path(config.output)
    with unwinding_signals("the same command continues where it ended"), input_errors(prefix):
        record = tokenize(config)
    with output_errors():
        print(summary(config.output, record), advice(config.output), sep="\n")


_BYTES = 256


def train_tokenizer(files: Sequence[str], field: str, vocab_size: int, limit: int) -> str:
    """Returns the JSON of a byte-level BPE (GPT-2's pre-tokenizer), trained on the start of every file.

    It depends only on the files' contents and order. Id 0 is `<|endoftext|>`; the next 256 are the bytes.
    Too little text gives a smaller vocabulary.

    Args:
      files: files for `Documents`; malformed lines are ignored here and reported when tokenizing.
      vocab_size: 257 or more.
      limit: characters to read in total, an equal share of each file.
    Raises:
      ValueError: vocab_size is too small, or there is no text.
      MissingExtraError: the package tokenizers is not installed.
    """
    if vocab_size < _BYTES + 1:
        raise ValueError(f"--vocab-size {vocab_size}: a byte-level BPE has at least {_BYTES + 1} tokens")
    library = tokenizers_library()
    alphabet = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    problems: list[str] = []
    tokenizer.train_from_iterator(_texts(files, field, max(limit // len(files), 1), problems), trainer)
    if tokenizer.get_vocab_size() == _BYTES + 1 < vocab_size:
        first = f", for example {problems[0]}" if problems else ""
        raise ValueError(
            f"--train-tokenizer: the files hold no text to train on{first}; in JSON it is read from "
            f"{field!r}, or from the field that --field names"
        )
    return tokenizer.to_str(pretty=True)


def _texts(files: Sequence[str], field: str, share: int, problems: list[str]) -> Iterator[str]:
    """Yields the first texts of each file; appends problems to their list."""
    for path in files:
        read = 0
        for item in Documents(path, field):
            if isinstance(item, Problem):
                problems.append(f"{path}:{item.line}: {item.kind}: {item.what}")
            else:
                yield item.text
                read += len(item.text)
            if read >= share:
                break
