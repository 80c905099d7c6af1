"""Documents in files, JSON lines, text, parquet, or compressed; and the problems found in them."""

import glob
import gzip
import io
import os
import re
import shlex
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from models.received import check_regular, fault_of, open_received, parse_json, special_kind
from training.process.start import check_extra

_JSON_LINES = (".json", ".jsonl")
_PROSE = (".txt", ".md", ".rst", ".tex")
_CODE = (".py", ".c", ".h", ".cc", ".cpp", ".cu", ".go", ".java", ".jl", ".js", ".rs", ".sh", ".ts")
_TEXT = (*_PROSE, *_CODE)
_COMPRESSED = ("", ".gz", ".zst")
_LARGEST = 2**30  # bytes of a document; a longer one has no room in memory with its tokens
_BUFFER = 2**20  # bytes of a parquet file to read at a time
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
WRITTEN = (".bin", ".idx", ".json", ".tokenizer.json", ".problems.txt")
"""The files that a tokenization writes, after its PREFIX."""
_CARD = {"README.md", "dataset_info.json", "dataset_infos.json"}
FIELD = "text"
"""The field, or column, that holds the text unless another is named."""
_WITH_LINES = tuple(kind + end for kind in _JSON_LINES for end in _COMPRESSED)
SUFFIXES = (*(kind + end for kind in (*_JSON_LINES, *_TEXT) for end in _COMPRESSED), ".parquet")
FORMATS = ".json, .jsonl, text such as .txt, .md and .py, each also with .gz or .zst, and .parquet"
"""The files that are read, in words."""


class Document(NamedTuple):
    """A text and its line, or row in a parquet file, counted from 1."""

    line: int
    text: str


class Problem(NamedTuple):
    """A skipped line: its number, the kind of problem, and the details."""

    line: int
    kind: str
    what: str


def find_files(patterns: Sequence[str], *, recursive: bool = False) -> list[str]:
    """Returns the files that match the patterns or lie in matching folders, sorted, without duplicates.

    Hidden files are left out of folders, and so is what describes a Hugging Face dataset in parquet. What a
    tokenization wrote is also left out of what a pattern matches.

    Args:
      patterns: names of files and folders, and patterns.
      recursive: also take files in folders of these folders; otherwise they are left out, since what was
        tokenized may lie there; see `below`.
    Raises:
      ValueError: a pattern matches nothing, a file has an unknown format, or parquet files of a folder belong
        to several splits.
      MissingExtraError: a file is parquet or compressed by zstd, and pyarrow is not installed.
    """
    found: set[str] = set()
    for pattern in patterns:
        paths = _paths([pattern])
        inside = [file for path in paths if os.path.isdir(path) for file in _in_folder(path, recursive)]
        files = [p for p in paths if os.path.isfile(p)] + inside
        if not files:
            check_regular(pattern, f"--input {pattern}")
            deeper = below([pattern])
            advice = f"; --recursive takes those below it, such as {deeper[0]}" if deeper else ""
            raise ValueError(f"--input {pattern!r} matches no file that is read: {FORMATS}{advice}")
        found.update(files)
    for path in found:
        if not path.endswith(SUFFIXES):
            raise ValueError(f"--input {path}: the files read are {FORMATS}")
    for suffix in (".parquet", ".zst"):
        if any(f.endswith(suffix) for f in found):
            check_extra("data", f"reading {suffix} files", "pyarrow")
    return sorted(found)


def below(patterns: Sequence[str], *, strict: bool = False) -> list[str]:
    """Returns the files that lie in a folder of a folder named, which `find_files` takes if it is recursive.

    Folders of unfinished tokenizations are left out, as are links to folders, which may be circular.

    Args:
      strict: raises OSError for a folder that cannot be read. Default: it is left out.
    """
    found: set[str] = set()
    for folder in filter(os.path.isdir, _paths(patterns)):
        for parent, folders, names in os.walk(folder, onerror=_fail if strict else None):
            folders[:] = [name for name in folders if not name.startswith(".") and ".partial" not in name]
            if parent != folder:
                found.update(filter(_is_read, (os.path.join(parent, name) for name in names)))
    return sorted(found)


def _in_folder(folder: str, recursive: bool) -> list[str]:
    deeper = below([folder], strict=recursive)
    files = [file.path for file in os.scandir(folder) if not file.is_dir() and _is_read(file.path)]
    is_dataset = any(file.endswith(".parquet") for file in (*files, *deeper))
    files += deeper if recursive else []
    if is_dataset:
        files = [file for file in files if os.path.basename(file) not in _CARD]
    splits = {split: file for file in sorted(files) if (split := _split(os.path.relpath(file, folder)))}
    if len(splits) > 1:
        one = splits.get("train", min(splits.values()))
        pattern = os.path.join(os.path.dirname(one), re.sub(r"\d+", "*", os.path.basename(one)))
        raise ValueError(
            f"--input {folder} holds the splits {', '.join(sorted(splits))} of a dataset: name the files of "
            f"one, such as {shlex.quote(pattern)}"
        )
    return files


def _fail(error: OSError) -> None:
    raise error


def _is_read(path: str) -> bool:
    """Returns whether a file of a folder is read: of a known kind, neither hidden nor made of other text."""
    return path.endswith(SUFFIXES) and not os.path.basename(path).startswith(".") and not _is_made(path)


def _is_made(path: str) -> bool:
    """Returns whether a tokenization wrote a file, which is no text of its own."""
    prefixes = [path.removesuffix(suffix) for suffix in WRITTEN if path.endswith(suffix)]
    is_tokenizer = os.path.basename(path) == "tokenizer.json"
    return is_tokenizer or any(os.path.exists(f"{prefix}.idx") for prefix in prefixes)


def _split(path: str) -> str | None:
    """Returns the split that the name of a parquet file or its folder says, by Hugging Face's keywords."""
    words = re.split(r"[^a-z]+", path.lower()) if path.endswith(".parquet") else ()
    return next((split for word in words for split, names in _SPLITS.items() if word in names), None)


def _paths(patterns: Sequence[str]) -> list[str]:
    found = ([p] if os.path.exists(p) else _matches(p) for p in patterns)
    return [path for paths in found for path in paths]


def _matches(pattern: str) -> list[str]:
    return [path for path in glob.glob(pattern, recursive=True) if not _is_made(path)]


class Documents:
    """The documents of a file, as an iterable of `Document` and `Problem`.

    A plain text file is one document; other files hold one document in a field of each line or row.

    Attributes:
      position: bytes of the file read so far.
    """

    def __init__(self, path: str, field: str = "text"):
        self._path, self._field = path, field
        self._has_lines = path.endswith(_WITH_LINES)
        self.position = 0

    def __iter__(self) -> Iterator[Document | Problem]:
        found = False
        for item in self._items():
            found = True
            yield item
        self.position = os.path.getsize(self._path)
        if not found:
            yield Problem(1, "empty file", "the file holds no documents")

    def _items(self) -> Iterator[Document | Problem]:
        try:
            raw = open_received(self._path, "the file", text=False)
        except ValueError as error:
            yield Problem(1, "unreadable file", str(error))
            return
        with raw:
            yield from self._rows() if self._path.endswith(".parquet") else self._file(raw)

    def _file(self, raw: io.BufferedReader) -> Iterator[Document | Problem]:
        line = 0
        format_ = {".gz": "gzip", ".zst": "zstd"}.get(os.path.splitext(self._path)[1])
        try:
            with _decompressed(raw, format_) as file:
                if fault := fault_of(file.peek(1)):
                    yield Problem(1, "unreadable file", f"the file {fault}")
                    return
                for line, content in enumerate(_lines(file) if self._has_lines else _whole(file), 1):
                    self.position = raw.tell()
                    yield self._parse(line, content)
        except EOFError:
            what = f"the {format_} stream is cut off; the lines before were read"
            yield Problem(line + 1, f"truncated {format_}", what)
        except (gzip.BadGzipFile, zlib.error, _ZstdError) as error:
            what = f"the {format_} stream is damaged ({error}); the lines before were read"
            yield Problem(line + 1, f"damaged {format_}", what)

    def _parse(self, line: int, content: bytes) -> Document | Problem:
        if len(content) > _LARGEST:
            return Problem(line, "oversized document", f"it has more than {_LARGEST:,} bytes")
        if not self._has_lines:
            try:
                return _checked(line, content.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                return Problem(line, "malformed text", str(error))
        try:
            parsed = parse_json(content)
        except ValueError as error:
            return Problem(line, "malformed line", f"it is {error}" if content.strip() else "a blank line")
        text = parsed.get(self._field) if isinstance(parsed, dict) else None
        if not isinstance(text, str):
            instead = "; a list is no document, write each on a line" if isinstance(parsed, list) else ""
            return Problem(line, "malformed line", f"no string called {self._field!r}{instead}")
        return _checked(line, text)

    def _rows(self) -> Iterator[Document | Problem]:
        import pyarrow  # optional, and slow to import

        _check_column(self._path, self._field)
        row = 0
        try:
            with _open_parquet(self._path) as file:
                size, rows = os.path.getsize(self._path), max(file.metadata.num_rows, 1)
                for batch in file.iter_batches(1024, columns=[self._field]):
                    for value in batch.column(0):
                        row += 1
                        self.position = size * row // rows
                        yield self._of_row(row, value)
        except (pyarrow.ArrowException, OSError) as error:
            yield Problem(row + 1, "damaged parquet", " ".join(str(error).split()))

    def _of_row(self, row: int, value: Any) -> Document | Problem:
        """Returns the document of a row; writers of parquet do not check that strings are UTF-8."""
        try:
            text = value.as_py()
        except (ValueError, ArithmeticError) as error:
            return Problem(row, "malformed text", str(error))
        if not isinstance(text, str):
            return Problem(row, "malformed line", f"no string in column {self._field!r}")
        return _checked(row, text)


class _ZstdError(Exception):
    """A zstd stream is damaged."""


class _Zstd(io.RawIOBase):
    """The bytes of a zstd stream, whose frames are joined."""

    def __init__(self, raw: io.BufferedReader):
        import pyarrow  # optional, and slow to import

        self._stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            return self._stream.readinto(buffer)
        except OSError as error:
            if error.errno is not None:  # of the disk
                raise
            if "Truncated" in str(error):
                raise EOFError from error
            raise _ZstdError(str(error)) from error


def _decompressed(raw: io.BufferedReader, format_: str | None) -> Any:
    """Returns a file of the decompressed bytes; closing it closes `raw`, unless gzip reads it."""
    if format_ == "zstd":
        return io.BufferedReader(_Zstd(raw))
    return gzip.open(raw) if format_ == "gzip" else raw


def _open_parquet(path: str) -> Any:
    from pyarrow.parquet import ParquetFile  # optional, and slow to import

    # Without a buffer whole row groups are read, and with pre_buffer those of the whole file.
    return ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False)


def check_columns(files: Sequence[str], field: str) -> None:
    """Raises ValueError if a parquet file has no such column, or all files are texts, which have no fields.

    A file that cannot be opened is a `Problem`.
    """
    if files and field != FIELD and not any(path.endswith((*_WITH_LINES, ".parquet")) for path in files):
        raise ValueError(f"--field {field}: {files[0]} is a document without fields; leave it out")
    for path in files:
        if path.endswith(".parquet") and special_kind(path) is None:
            _check_column(path, field)


def _check_column(path: str, field: str) -> None:
    import pyarrow

    try:
        with _open_parquet(path) as file:
            names = file.schema_arrow.names
    except (pyarrow.ArrowException, OSError):
        return
    if field not in names:
        raise ValueError(f"{path} has no column {field!r}; name one of {', '.join(names)} with --field")


def _lines(file: Any) -> Iterator[bytes]:
    """Yields the lines of a file, and of one that is too long only so much that it is seen to be."""
    while line := file.readline(_LARGEST + 1):
        yield line
        while line and not line.endswith(b"\n"):
            line = file.readline(_LARGEST + 1)


def _whole(file: Any) -> Iterator[bytes]:
    """Yields the whole file as one piece, cut if it is too long; raises EOFError for a damaged one."""
    yield file.read(_LARGEST + 1)


def _checked(line: int, text: str) -> Document | Problem:
    if not text:
        return Problem(line, "empty document", "the text is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        return Problem(line, "malformed text", str(error))
    return Document(line, text)
