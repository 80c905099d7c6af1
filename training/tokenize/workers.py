"""The shards of a tokenization, one for each input file, made by several processes.

Shard i is FOLDER/i.bin (token ids), i.lengths (int32, tokens of each document) and i.json (counts, problems,
sizes and checksums of the other two). The .json comes last, so that after a crash a shard is either complete
or made again. A shard that was damaged since is made again too.
"""

import collections
import concurrent.futures
import concurrent.futures.process
import ctypes
import itertools
import json
import multiprocessing
import os
import pathlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from training.data.tokenizer import SpecialTokens, load_tokenizer
from training.files import problem, read_checked, size_and_crc32, temporary_path, to_checked
from training.tokenize.documents import Document, Documents, Problem

_BATCH = 2**17  # characters encoded at a time
_RECORDS = "[0-9]*.json"


class Job(NamedTuple):
    """Everything that a worker process needs; see `TokenizeConfig`."""

    folder: pathlib.Path
    tokenizer: pathlib.Path
    field: str
    eod: int | None
    escape: bool
    dtype: str
    threads: int


class Shard(NamedTuple):
    """A finished shard: its number, its input file, counts and problems.

    `spelled` counts the documents that spell a special token, by its name.
    """

    number: int
    path: str
    documents: int
    tokens: int
    problems: list[Problem]
    spelled: dict[str, int]


class _Counts(NamedTuple):
    """Counts while a shard is made: tokens of each document, problems, and `Shard.spelled`."""

    lengths: list[int]
    problems: list[Problem]
    spelled: collections.Counter[str]


class Interrupted(Exception):
    """The run is to end; raised in worker processes."""


def finished(folder: pathlib.Path, files: Sequence[str]) -> tuple[dict[int, Shard], list[str]]:
    """Returns the finished shards, by number, and messages about those that have been damaged since."""
    begun = [i for i in range(len(files)) if _path(folder, i, "json").exists()]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        problems = dict(zip(begun, pool.map(lambda i: _problem(folder, i), begun), strict=True))
    done = {i: _read(folder, i, files[i]) for i in begun if problems[i] is None}
    return done, [f"{found}: {files[i]} is tokenized again" for i, found in problems.items() if found]


def _problem(folder: pathlib.Path, number: int) -> str | None:
    """Returns which file of a finished shard is damaged, and how; None if all are good."""
    path = _path(folder, number, "json")
    record = _record(path)
    if record is None:
        return f"{path} is damaged"
    found = ((folder / name, problem(folder / name, sums)) for name, sums in record["files"].items())
    return next((f"{file} {said}" for file, said in found if said), None)


def have_tokens(folder: pathlib.Path) -> bool:
    """Returns whether a finished shard holds tokens, or may: its record is damaged."""
    return any((_record(path) or {"tokens": 1})["tokens"] for path in folder.glob(_RECORDS))


def _record(path: pathlib.Path) -> dict[str, Any] | None:
    """Returns the record of a shard; None if it is damaged or missing."""
    return read_checked(path, documents=int, tokens=int, problems=list, spelled=dict)


def remove(folder: pathlib.Path) -> None:
    """Makes all shards unfinished."""
    for path in folder.glob(_RECORDS):
        path.unlink()


def make(
    job: Job, files: Sequence[str], numbers: Sequence[int], processes: int, show: Callable[[int, int], None]
) -> Iterator[Shard]:
    """Makes the shards with the given numbers and yields each one when it is done.

    Args:
      show: called several times a second with the bytes read and the tokens made so far.
    Raises:
      ValueError: a file cannot be read, or a process was killed. Finished shards are kept.
    """
    # Workers fork from a process that has imported everything and started no threads, and share its memory.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "training.process.environment", "rich.progress", "tyro"])
    state = context.Array(ctypes.c_int64, 3)  # bytes, tokens, stop
    largest_first = sorted(numbers, key=lambda i: -os.path.getsize(files[i]))
    with concurrent.futures.ProcessPoolExecutor(
        processes, mp_context=context, initializer=_start, initargs=(job, state)
    ) as pool:
        waiting = {pool.submit(_make, i, files[i]) for i in largest_first}
        try:
            while waiting:
                done, waiting = concurrent.futures.wait(
                    waiting, timeout=0.2, return_when=concurrent.futures.FIRST_COMPLETED
                )
                show(state[0], state[1])
                for number in sorted(future.result() for future in done):
                    yield _read(job.folder, number, files[number])
        except concurrent.futures.process.BrokenProcessPool as error:
            raise ValueError(
                "a worker process ended unexpectedly, perhaps for lack of memory; the same command continues "
                "the run, and fewer --workers need less memory"
            ) from error
        except BaseException:
            state[2] = 1
            pool.shutdown(cancel_futures=True)
            raise


def lengths(folder: pathlib.Path, shard: Shard) -> np.ndarray:
    """Returns the int32 lengths of a shard's documents."""
    return np.fromfile(_path(folder, shard.number, "lengths"), np.int32)


def bin_path(folder: pathlib.Path, shard: Shard) -> pathlib.Path:
    """Returns the file of a shard's token ids."""
    return _path(folder, shard.number, "bin")


_process: tuple[Job, Any, Any]  # in each worker: the job, the shared counts, the tokenizer


def _start(job: Job, state: Any) -> None:
    global _process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["RAYON_NUM_THREADS"] = str(job.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if job.threads > 1 else "false"
    _process = job, state, load_tokenizer(job.tokenizer)


def _end_with_parent() -> None:
    """Ends this process when its parent is killed, so that it writes nothing more."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _make(number: int, path: str) -> int:
    job, state, tokenizer = _process
    tokenizer.encode_special_tokens = job.escape  # the package's word for encoding them as text
    special = SpecialTokens(tokenizer, job.eod)
    documents, read = Documents(path, job.field), 0
    counts = _Counts([], [], collections.Counter())
    path_of_ids = _path(job.folder, number, "bin")
    with temporary_path(path_of_ids).open("wb") as file:
        for batch in _batches(documents, counts.problems):
            try:
                ids = _encode(tokenizer, special, batch, job, counts)
            except Exception as error:  # the package raises no narrower type
                said = f"the tokenizer cannot encode a text between line {batch[0].line} and "
                raise ValueError(f"{path}: {said}{batch[-1].line}: {error}") from error
            file.write(ids.tobytes())
            with state.get_lock():
                state[0] += documents.position - read
                state[1] += len(ids)
                if state[2]:
                    raise Interrupted
            read = documents.position
    temporary_path(path_of_ids).replace(path_of_ids)
    path_of_lengths = _path(job.folder, number, "lengths")
    _write(path_of_lengths, np.array(counts.lengths, np.int32).tobytes())
    record = {
        "documents": len(counts.lengths),
        "tokens": sum(counts.lengths),
        "problems": sorted(counts.problems),
        "spelled": counts.spelled,
        "files": {path.name: size_and_crc32(path) for path in (path_of_ids, path_of_lengths)},
    }
    _write(_path(job.folder, number, "json"), to_checked(record).encode())
    return number


def _write(path: pathlib.Path, content: bytes) -> None:
    """Writes a file whole, but does not wait for the disk: checksums show what a lost machine did not write.

    Thousands of small files would take minutes.
    """
    temporary_path(path).write_bytes(content)
    temporary_path(path).replace(path)


def _batches(documents: Documents, problems: list[Problem]) -> Iterator[list[Document]]:
    """Yields batches of about a hundred thousand characters; appends problems to their list."""
    batch, size = [], 0
    for item in documents:
        if isinstance(item, Problem):
            problems.append(item)
            continue
        batch.append(item)
        size += len(item.text)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    yield batch


def _encode(
    tokenizer: Any, special: SpecialTokens, batch: list[Document], job: Job, counts: _Counts
) -> np.ndarray:
    """Returns the concatenated ids of all documents, and counts them."""
    # "fast" computes no offsets into the text, which are not needed.
    encodings = tokenizer.encode_batch_fast([document.text for document in batch], add_special_tokens=False)
    parts = [encoding.ids for encoding in encodings]
    for document, part in zip(batch, parts, strict=True):
        if not part:
            counts.problems.append(Problem(document.line, "empty document", "the text has no tokens"))
            continue
        spelled = special.spelled(document.text)
        # A normalizer may make the end of a document of a text without it, as NFKC of wide brackets.
        ids = {name: i for name, i in special.ids.items() if name in spelled or i == job.eod}
        if job.escape and (same := [name for name, i in ids.items() if i in part]):
            what = f"the tokenizer has no other tokens for {same[0]}, which the text spells"
            counts.problems.append(Problem(document.line, "special token", what))
            part.clear()
            continue
        counts.spelled.update(spelled)
        if job.eod is not None:
            part.append(job.eod)
        counts.lengths.append(len(part))
    return np.fromiter(itertools.chain.from_iterable(parts), job.dtype, sum(map(len, parts)))


def _read(folder: pathlib.Path, number: int, path: str) -> Shard:
    record = json.loads(_path(folder, number, "json").read_text())
    problems = [Problem(*problem) for problem in record["problems"]]
    return Shard(number, path, record["documents"], record["tokens"], problems, record["spelled"])


def _path(folder: pathlib.Path, number: int, suffix: str) -> pathlib.Path:
    return folder / f"{number:05d}.{suffix}"
