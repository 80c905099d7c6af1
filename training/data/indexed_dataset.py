"""Megatron indexed datasets: token sequences in PREFIX.bin, their positions in PREFIX.idx, memory-mapped.

The .bin holds the sequences one after another and nothing else. The .idx is little-endian: the magic
`MMIDIDX\\0\\0`, u64 version 1, u8 code of the tokens' dtype, u64 number of sequences n, u64 number of
document bounds d, then i32 lengths[n], i64 byte offsets[n], i64 bounds[d] (the first sequence of each
document, and n). Some writers add i8 modes[n], which are ignored.

Source: megatron-core 0.16, `megatron/core/datasets/indexed_dataset.py`.
"""

import itertools
import mmap
import os
import pathlib
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64, Integer

from models.received import open_received
from training.files import sync, temporary_path

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
# Codes 6 and 7 are float64 and float32, not token ids.
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}
_CHUNK = 2**22  # sequences checked at a time, which keeps temporary arrays small
_SAMPLES, _SAMPLE = 64, 2**20  # pieces of a .bin read at the start, and tokens of each

_ADVISES = hasattr(mmap, "MADV_RANDOM")  # not available on every system

BOTH_FILES = (
    "a dataset PREFIX is PREFIX.bin and PREFIX.idx: copy both. nanoGPT's .bin has no .idx: tokenize its text "
    "with `python -m training.tokenize`"
)
"""Advice for one file of two, for messages."""

Tokens = Integer[np.ndarray, " n"]


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the dtype of token ids: uint16 for vocabularies below 65,500, else int32, as Megatron does."""
    return np.dtype(np.uint16 if vocab_size < 65_500 else np.int32)


class IndexedDataset:
    """The sequences of one dataset. Pickles as its prefix.

    Attributes:
      lengths: tokens of each sequence.
      offsets: position of each sequence in the .bin, in bytes.
      bounds: first sequence of each document, then the number of sequences.
      tokens: all tokens in the order of the file. All four arrays are memory-mapped.
    """

    lengths: Int32[np.ndarray, " sequences"]
    offsets: Int64[np.ndarray, " sequences"]
    bounds: Int64[np.ndarray, " bounds"]
    tokens: Tokens

    def __init__(self, prefix: str | os.PathLike[str]):
        """Opens and checks the two files; reads the .idx once and nothing of the .bin.

        Raises:
          ValueError: the files are missing, truncated, in another format, or do not belong together.
        """
        self.prefix = os.fspath(prefix)
        self._index_path, self._bin_path = self.prefix + ".idx", self.prefix + ".bin"
        for path in (self._index_path, self._bin_path):
            try:
                open_received(path, text=False).close()
            except (FileNotFoundError, IsADirectoryError):
                raise ValueError(f"{path}: no such file; {BOTH_FILES}") from None
        self._map_index()
        self._check_index()
        self._map_tokens()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tokens:
        """Returns the tokens of a sequence without copying."""
        start = int(self.offsets[index]) // self.tokens.itemsize
        return self.tokens[start : start + int(self.lengths[index])]

    def gather(self, starts: list[int], stops: list[int]) -> Tokens:
        """Returns copies of tokens[start:stop] from several places of the file, concatenated.

        The exact pages are requested from the system before the first one is read. The default read-ahead
        suits sequential reading and would read a hundred times too much here.
        """
        if _ADVISES:
            size = self._scattered.itemsize
            for start, stop in zip(starts, stops, strict=True):
                if stop > start:
                    page = start * size // mmap.PAGESIZE * mmap.PAGESIZE
                    self._map.madvise(mmap.MADV_WILLNEED, page, stop * size - page)
        return np.concatenate([self._scattered[a:b] for a, b in zip(starts, stops, strict=True)])

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return type(self), (self.prefix,)

    def check_ids(self, vocab_size: int) -> None:
        """Checks ids against a vocabulary: all of a file up to 64 M tokens, 64 pieces of a larger one.

        The pieces lie evenly between the first and the last token; the check takes seconds whatever the size.
        `check_tokens` checks the rest when it is read.

        Raises:
          ValueError: an id is negative, or vocab_size or greater.
        """
        for start, piece in self._pieces():
            check_tokens(piece, vocab_size, f"{self._bin_path}, from token {start:,} on,")

    def checksum(self) -> str:
        """Returns a CRC-32 of the lengths and of the pieces of the .bin that `check_ids` reads."""
        crc = zlib.crc32(self.lengths)
        for _, piece in self._pieces():
            crc = zlib.crc32(np.ascontiguousarray(piece), crc)
        return f"{crc:08x}"

    def document_end(self) -> int | None:
        """Returns the token that ends documents: every one, and at most one in a hundred holds it elsewhere.

        It is sought in the first documents, about a million tokens. None if there is none, or one document.
        """
        count = max(int(np.searchsorted(self.offsets, _SAMPLE * self.tokens.itemsize)), 2)
        lengths = self.lengths[:count]
        stops = np.cumsum(lengths, dtype=np.int64)[lengths > 0]
        if len(stops) < 2:
            return None
        tokens = self.tokens[: stops[-1]]
        is_end = tokens == tokens[-1]
        elsewhere = np.count_nonzero(is_end) - len(stops)
        return int(tokens[-1]) if is_end[stops - 1].all() and elsewhere <= len(stops) // 100 else None

    def _pieces(self) -> Iterator[tuple[int, Tokens]]:
        total = len(self.tokens)
        if total <= _SAMPLES * _SAMPLE:
            starts = range(0, total, _SAMPLE)
        else:
            starts = [(total - _SAMPLE) * i // (_SAMPLES - 1) for i in range(_SAMPLES)]
        for start in starts:
            yield start, self.tokens[start : start + _SAMPLE]

    def _map_index(self) -> None:
        path, size = self._index_path, os.path.getsize(self._index_path)
        with open(path, "rb") as file:
            header = file.read(_HEADER.size)
        if not header.startswith(MAGIC):
            raise ValueError(
                f"{path} does not begin with {MAGIC!r}, so it is no index of a Megatron dataset; make one "
                "with `python -m training.tokenize`"
            )
        if len(header) < _HEADER.size:
            raise ValueError(
                f"{path} is truncated: it has {len(header)} bytes and its header takes {_HEADER.size}"
            )
        _, version, code, sequences, bounds = _HEADER.unpack(header)
        if version != VERSION:
            raise ValueError(f"{path} has version {version}; only version {VERSION} can be read")
        if code not in _DTYPES:
            raise ValueError(
                f"{path}: the dtype code {code} is not one of token ids, which are {sorted(_DTYPES)}"
            )
        expected = _HEADER.size + 12 * sequences + 8 * bounds
        if size not in (expected, expected + sequences):
            state = "truncated" if size < expected else "longer than it should be"
            raise ValueError(
                f"{path} is {state}: {sequences:,} sequences and {bounds:,} document bounds take "
                f"{expected:,} bytes and it has {size:,}; copy it again"
            )
        self.dtype = np.dtype(_DTYPES[code])
        data = np.asarray(np.memmap(path, np.uint8, "r"))  # slicing a plain array is much cheaper
        cuts = np.cumsum([_HEADER.size, 4 * sequences, 8 * sequences, 8 * bounds])
        parts = [data[a:b] for a, b in itertools.pairwise(cuts)]
        self.lengths, self.offsets = parts[0].view(np.int32), parts[1].view(np.int64)
        self.bounds = parts[2].view(np.int64)

    def _check_index(self) -> None:
        """Checks that the sequences are contiguous in the .bin and fill it."""
        size, end = os.path.getsize(self._bin_path), 0
        for start in range(0, len(self), _CHUNK):
            lengths = self.lengths[start : start + _CHUNK]
            offsets = np.concatenate([[end], lengths]).cumsum(dtype=np.int64)
            offsets = end + (offsets - end) * self.dtype.itemsize
            if lengths.min() < 0 or not np.array_equal(self.offsets[start : start + _CHUNK], offsets[:-1]):
                raise ValueError(
                    f"{self._index_path}: lengths and offsets of the sequences disagree; copy it again"
                )
            end = int(offsets[-1])
        if end != size:
            state = "truncated" if size < end else "longer than it should be"
            raise ValueError(
                f"{self._bin_path} is {state}: the sequences of the .idx take {end:,} bytes and it has "
                f"{size:,}; copy both files again"
            )
        if end == 0:
            raise ValueError(f"{self.prefix} holds no tokens")

    def _map_tokens(self) -> None:
        self.tokens = np.asarray(np.memmap(self._bin_path, self.dtype, "r"))
        with open(self._bin_path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if _ADVISES:
            self._map.madvise(mmap.MADV_RANDOM)
        self._scattered = np.frombuffer(self._map, self.dtype)


def check_tokens(tokens: Tokens, vocab_size: int, what: str) -> None:
    """Raises ValueError if an id is negative, or vocab_size or greater; `what` names the tokens."""
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        count, first = _outside(tokens, vocab_size)
        raise ValueError(
            f"{what} holds the token id {low if low < 0 else high}, and the vocabulary has {vocab_size:,}: "
            "the data probably comes from another tokenizer; pass its --vocab-size, or tokenize again. If "
            f"only a few ids are outside, the file is damaged: {count:,} of {tokens.size:,} are, at first "
            f"number {first:,} of these"
        )


def _outside(tokens: Tokens, vocab_size: int) -> tuple[int, int]:
    """Returns how many ids are outside of the vocabulary, and the place of the first."""
    count, first = 0, -1
    for start in range(0, tokens.size, _CHUNK):
        piece = tokens[start : start + _CHUNK]
        outside = (piece < 0) | (piece >= vocab_size)
        if first < 0 and outside.any():
            first = start + int(outside.argmax())
        count += int(np.count_nonzero(outside))
    return count, first


class IndexedWriter:
    """Writes PREFIX.bin and PREFIX.idx under temporary names. A context manager.

    At the end of the block both files are renamed; after an exception neither is.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: Any):
        """Creates the folder if it is missing.

        Raises:
          ValueError: token ids cannot have this dtype.
        """
        self._prefix, self.dtype = os.fspath(prefix), np.dtype(dtype)
        if self.dtype not in _CODES:
            raise ValueError(
                f"token ids are written as one of {', '.join(map(str, _CODES))}, not as {self.dtype}"
            )
        self._bin, self._index = (pathlib.Path(self._prefix + suffix) for suffix in (".bin", ".idx"))
        self._bin.parent.mkdir(parents=True, exist_ok=True)
        self._lengths: list[np.ndarray] = []

    def __enter__(self) -> "IndexedWriter":
        self._file = temporary_path(self._bin).open("wb")
        return self

    def __exit__(self, kind: type | None, *exception: Any) -> None:
        with self._file:
            if kind is None:
                sync(self._file)
        if kind is None:
            lengths = np.concatenate([np.zeros(0, np.int32), *self._lengths])
            write_index(temporary_path(self._index), self.dtype, lengths)
            for path in (self._bin, self._index):  # the .idx last: it completes the dataset
                temporary_path(path).replace(path)
        else:
            temporary_path(self._bin).unlink()

    def add(self, tokens: Tokens) -> None:
        """Appends a document of one sequence.

        Raises:
          ValueError: the dtype cannot hold an id.
        """
        ids = tokens.astype(self.dtype)
        if not np.array_equal(ids, tokens):
            raise ValueError(f"token ids from {tokens.min()} to {tokens.max()} do not fit into {self.dtype}")
        self._file.write(ids.tobytes())
        self._lengths.append(np.array([len(ids)], np.int32))

    def add_file(self, path: str | os.PathLike[str], lengths: Int32[np.ndarray, " documents"]) -> None:
        """Appends documents of one sequence each, from a file that holds only their ids in this dtype.

        Raises:
          ValueError: the file's size does not match the lengths.
        """
        expected = int(lengths.sum(dtype=np.int64)) * self.dtype.itemsize
        if os.path.getsize(path) != expected:
            raise ValueError(
                f"{path} should have {expected:,} bytes and has {os.path.getsize(path):,}; remove it"
            )
        with open(path, "rb") as file:
            while block := file.read(2**24):
                self._file.write(block)
        self._lengths.append(lengths)


def write_index(path: pathlib.Path, dtype: np.dtype, lengths: Int32[np.ndarray, " n"]) -> None:
    """Writes an .idx in which each document is one sequence. Not atomic."""
    offsets = np.concatenate([[0], lengths]).cumsum(dtype=np.int64)[:-1] * dtype.itemsize
    with path.open("wb") as file:
        file.write(_HEADER.pack(MAGIC, VERSION, _CODES[dtype], len(lengths), len(lengths) + 1))
        for part in (lengths, offsets, np.arange(len(lengths) + 1, dtype=np.int64)):
            file.write(np.ascontiguousarray(part, part.dtype.newbyteorder("<")))
        sync(file)
