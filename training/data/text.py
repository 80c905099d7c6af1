"""Text as training data, read as bytes: token ids are bytes, and 256 ends a document.

Batches are windows of a token stream, a pure function of the seed and the step: int32 [batch, seq_len + 1],
whose inputs are all tokens of a row but the last, and targets all but the first.
"""

import dataclasses
import os
import pathlib
import shlex
import sysconfig
import zlib
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np
from jaxtyping import Int32, Integer, UInt16

from models.received import check_regular, open_received, parse_json
from training.config import DataConfig
from training.data.indexed_dataset import BOTH_FILES, check_tokens

AnyTokens = Integer[np.ndarray, " n"]


class Windows:
    """The windows of a token stream: tokens i * seq_len to (i + 1) * seq_len, inclusive.

    Neighbours share one token.
    """

    def __init__(self, tokens: Integer[np.ndarray, " n"], seq_len: int, part: str):
        self.tokens, self.seq_len = tokens, seq_len
        if not len(self):
            raise ValueError(
                f"a sequence needs --seq-len + 1 = {seq_len + 1} tokens and the {part} data has "
                f"{len(tokens)}; shorten --seq-len or give more text"
            )

    def __len__(self) -> int:
        return max(len(self.tokens) - 1, 0) // self.seq_len

    def __getitem__(self, index: int) -> Int32[np.ndarray, " length"]:
        start = index * self.seq_len
        return self.tokens[start : start + self.seq_len + 1].astype(np.int32)


def shuffled_batches(source: Any, seed: int, batch_size: int) -> grain.MapDataset:
    """Returns the batches of a source, shuffled anew in each epoch."""
    # Practically endless. An endless dataset overflows grain's count when a batch is one sequence.
    epochs = 2**62 // max(len(source), 1)
    return grain.MapDataset.source(source).shuffle(seed=seed).repeat(epochs).batch(batch_size)


def evaluation_batches(
    tokens: Integer[np.ndarray, " n"],
    config: DataConfig,
    n_batches: int,
    vocab_size: int | None = None,
    *,
    n_sequences: int | None = None,
    part: str = "validation",
) -> Iterator[Int32[np.ndarray, "batch length"]]:
    """Yields the first n_batches batches of the tokens, in order; the last may be short.

    Args:
      vocab_size: checks the token ids against this vocabulary.
      n_sequences: yields exactly this many sequences instead of n_batches.
      part: name of the data, for messages.
    Raises:
      ValueError: too few tokens, or an id of vocab_size or greater.
    """
    windows = Windows(tokens, config.seq_len, part)
    end = min(len(windows), n_batches * config.batch_size)
    if n_sequences is not None:
        end = n_sequences
        if end > len(windows):
            raise ValueError(
                f"--eval-sequences {end} asks for more than the {len(windows)} of the {part} data"
            )
    for start in range(0, end, config.batch_size):
        batch = np.stack([windows[i] for i in range(start, min(start + config.batch_size, end))])
        if vocab_size is not None:
            check_tokens(batch.ravel(), vocab_size, f"the {part} data")
        yield batch


def rows_of_a_shard(batch_size: int, count: int) -> int:
    """Returns the number of sequences of a batch that each of `count` processes reads.

    Raises:
      ValueError: `count` does not divide the batch.
    """
    if batch_size % count:
        raise ValueError(f"--batch-size {batch_size} must be a multiple of the {count} processes")
    return batch_size // count


END_OF_DOCUMENT = 256
VOCAB_SIZE = 257
_VALIDATION_SHARE = 20  # one file, or one byte, in 20
_COMPRESSED, _LINES, _DATASET = {".gz", ".zst", ".parquet"}, {".json", ".jsonl"}, (".bin", ".idx")
_LONGEST_LINE = 2**24  # bytes
_MEMORY = 5  # bytes that reading a byte takes: itself, and twice a token of two
_NOT_SOURCE = {"site-packages", "dist-packages", "__pycache__", "test", "tests"}

Tokens = UInt16[np.ndarray, "n"]


@dataclasses.dataclass(frozen=True)
class TextCorpus:
    """Text as bytes, split into training and validation.

    Attributes:
      train, validation: token ids.
      source: origin of the text.
      vocab_size: vocabulary of the model.
    """

    train: Tokens
    validation: Tokens
    source: str
    vocab_size: int = VOCAB_SIZE

    @property
    def train_tokens(self) -> int:
        """Number of training tokens."""
        return len(self.train)

    @property
    def document_end(self) -> int:
        """The token that ends a document."""
        return END_OF_DOCUMENT

    def batches(
        self, config: DataConfig, seed: int, steps: int, start: int = 0, shard: tuple[int, int] = (0, 1)
    ) -> grain.DatasetIterator:
        """Returns an endless iterator over batches, read ahead by grain.

        Each epoch visits every window once, in an order drawn from `seed`. The iterator's position is the
        step: `get_state()["next_index"]`.

        Args:
          start: number of steps already taken.
          shard: (i, n) yields the i-th of n equal parts of each batch.
        Raises:
          ValueError: too few tokens for one sequence, or batch_size is not a multiple of n.
        """
        index, count = shard
        rows_of_a_shard(config.batch_size, count)
        dataset = shuffled_batches(Windows(self.train, config.seq_len, "training"), seed, config.batch_size)
        if count > 1:
            dataset = dataset.map(lambda batch: np.split(batch, count)[index])
        iterator = iter(dataset.to_iter_dataset())
        iterator.set_state({"next_index": start})
        return iterator

    def order(self, config: DataConfig, seed: int, steps: int) -> str:
        """Returns no words: unlike a dataset's, the order does not depend on the length of the run."""
        return ""

    def batch_indices(self, config: DataConfig, seed: int, steps: int, step: int) -> dict[str, list[int]]:
        """Returns the indices of the windows that make up the batch of a step, counted from 0."""
        windows = np.arange(len(Windows(self.train, config.seq_len, "training")))
        return {"windows": np.asarray(shuffled_batches(windows, seed, config.batch_size)[step]).tolist()}

    @property
    def facts(self) -> dict[str, int | str]:
        """The identity of the data: source, sizes and a checksum."""
        checksum = zlib.crc32(self.validation.tobytes(), zlib.crc32(self.train.tobytes()))
        sizes = {"train_tokens": len(self.train), "validation_tokens": len(self.validation)}
        return {"source": self.source, **sizes, "crc32": f"{checksum:08x}"}


def load_text(path: pathlib.Path | None, flag: str = "--data") -> TextCorpus:
    """Returns the text of a file or a folder; None reads Python's standard library.

    The files of a folder are split into training and validation by a checksum of their names, so that adding
    a file moves no other. A single file is split near its end, and so are folders with too few files for
    both parts. Hidden files are left out.

    Args:
      flag: the flag that names it, for messages.
    Raises:
      ValueError: there is nothing to read, or it is not text.
    """
    if path is None:
        root = pathlib.Path(sysconfig.get_paths()["stdlib"])
        files = [f for f in root.rglob("*.py") if not _NOT_SOURCE & set(f.relative_to(root).parts)]
        return _split_by_file(root, files, "the source of Python's standard library")
    if path.is_file():
        _check_text(path, [path], flag)
        return _split_by_position(_join([_read(path)]), str(path))
    check_regular(path, f"{flag} {path}")
    if not path.is_dir():
        raise ValueError(f"{flag} {path}: no such file, folder, or dataset {path}.idx")
    files = [f for f in path.rglob("*") if f.is_file() and not _hidden(f.relative_to(path))]
    if not files:
        raise ValueError(f"{flag} {path}: no files to read")
    _check_text(path, files, flag)
    return _split_by_file(path, files, str(path))


def _split_by_file(root: pathlib.Path, files: list[pathlib.Path], source: str) -> TextCorpus:
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for file in sorted(files):
        checksum = zlib.crc32(file.relative_to(root).as_posix().encode())
        parts[checksum < 2**32 // _VALIDATION_SHARE].append(_read(file))
    train, validation = map(_join, parts)
    if not len(train) or not len(validation):
        return _split_by_position(np.concatenate([train, validation]), source)
    return TextCorpus(train, validation, source)


def _split_by_position(tokens: Tokens, source: str) -> TextCorpus:
    cut = len(tokens) - len(tokens) // _VALIDATION_SHARE
    return TextCorpus(tokens[:cut], tokens[cut:], source)


def _join(documents: list[bytes]) -> Tokens:
    end = np.array([END_OF_DOCUMENT], np.uint16)
    parts = [part for d in documents if d for part in (np.frombuffer(d, np.uint8).astype(np.uint16), end)]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint16)


def _read(path: pathlib.Path) -> bytes:
    with open_received(path) as file:
        return file.read()


def _check_text(root: pathlib.Path, files: list[pathlib.Path], flag: str) -> None:
    """Raises ValueError if a file of `root` is compressed or holds tokens, if most of its bytes are JSON
    documents, or if the host's memory cannot hold them. `_read` looks at the first bytes of each."""
    for path in files:
        if path.suffix in _COMPRESSED:
            raise ValueError(f"{path} is compressed, not text; {_tokenizing(root, path, flag)}")
        if path.suffix in _DATASET and all(path.with_suffix(s).is_file() for s in _DATASET):
            raise ValueError(
                f"{path} holds tokens, not text; give {flag} {shlex.quote(str(path.with_suffix('')))}"
            )
        if path.suffix == ".bin":
            try:
                open_received(path).close()
            except ValueError as error:
                raise ValueError(f"{error}; {BOTH_FILES}") from None
    documents = [path for path in files if path.suffix in _LINES and _holds_documents(path)]
    if 2 * _bytes(documents) > _bytes(files):
        raise ValueError(
            f"{documents[0]} holds documents as lines of JSON, not text; "
            f"{_tokenizing(root, documents[0], flag)}. To train on the JSON itself, give it another suffix"
        )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if (size := _MEMORY * _bytes(files)) > memory:
        raise ValueError(
            f"{flag} {root}: text is read whole, which takes {size:,} of {memory:,} bytes of memory; "
            f"{_tokenizing(root, files[0], flag)}"
        )


def _holds_documents(path: pathlib.Path) -> bool:
    """Whether the first line of a file is a JSON object with a text, as in C4."""
    with path.open("rb") as file:
        try:
            found = parse_json(file.readline(_LONGEST_LINE))
        except ValueError:
            return False
    return isinstance(found, dict) and isinstance(found.get("text"), str)


def _bytes(files: list[pathlib.Path]) -> int:
    return sum(path.stat().st_size for path in files)


def _tokenizing(root: pathlib.Path, path: pathlib.Path, flag: str) -> str:
    """Returns how to train on the documents of `root`, of which `path` is one file."""
    if flag != "--data":
        return "tokenize it as --data is, or write its texts into plain files"
    name = shlex.quote(str(root))
    if root.is_dir() and any(root.glob("c4-train.*.json.gz")):  # the validation split stands beside it
        name = shlex.quote(f"{root}/c4-train.*.json.gz")
    elif path.parent != root and path != root:
        name += " --recursive"
    command = f"python -m training.tokenize --input {name} --output PREFIX --train-tokenizer --append-eod"
    return f"tokenize it first: {command}, then {flag} PREFIX"


def _hidden(path: pathlib.Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
