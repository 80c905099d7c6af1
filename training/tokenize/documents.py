"""Documents in files: C4's gzip JSON lines, .jsonl, plain text, parquet; and the problems found in them."""

import glob
import gzip
import io
import os
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from models.received import check_regular, fault_of, open_received, parse_json
from training.process.extras import check_extra

_JSON_LINES = (".json", ".jsonl")
_LARGEST = 2**30  # bytes of a document; a longer one has no room in memory with its tokens
SUFFIXES = (".json.gz", ".jsonl.gz", ".json", ".jsonl", ".txt.gz", ".txt", ".parquet")


class Document(NamedTuple):
    """A text and its line, or row in a parquet file, counted from 1."""

    line: int
    text: str


class Problem(NamedTuple):
    """A skipped line: its number, the kind of problem, and the details."""

    line: int
    kind: str
    what: str


def find_files(patterns: Sequence[str]) -> list[str]:
    """Returns the files that match the patterns or lie in matching folders, sorted, without duplicates.

    Files in folders of these folders are left out, since what was tokenized may lie there; see `below`.

    Raises:
      ValueError: a pattern matches nothing, or a file has an unknown format.
      MissingExtraError: a file is parquet and pyarrow is not installed.
    """
    found: set[str] = set()
    for pattern in patterns:
        paths = _paths([pattern])
        inside = [f for p in paths if os.path.isdir(p) for f in glob.glob(os.path.join(glob.escape(p), "*"))]
        files = [p for p in paths if os.path.isfile(p)] + [f for f in inside if f.endswith(SUFFIXES)]
        if not files:
            check_regular(pattern, f"--input {pattern}")
            raise ValueError(f"--input {pattern!r} matches no file of {', '.join(SUFFIXES)}")
        found.update(files)
    for path in found:
        if not path.endswith(SUFFIXES):
            raise ValueError(f"--input {path}: the files read are {', '.join(SUFFIXES)}")
    if any(f.endswith(".parquet") for f in found):
        check_extra("data", "reading .parquet files", "pyarrow")
    return sorted(found)


def below(patterns: Sequence[str]) -> list[str]:
    """Returns the files that `find_files` leaves out because they lie in a folder of a folder named.

    Folders that hold tokens, or a part of them, are left out here too.
    """
    found: set[str] = set()
    for folder in filter(os.path.isdir, _paths(patterns)):
        for parent, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if not name.startswith(".") and ".partial" not in name]
            if parent != folder and not any(name.endswith(".idx") for name in names):
                found.update(os.path.join(parent, name) for name in names if name.endswith(SUFFIXES))
    return sorted(found)


def _paths(patterns: Sequence[str]) -> list[str]:
    """Returns the files and folders that patterns name."""
    found = ([p] if os.path.exists(p) else glob.glob(p, recursive=True) for p in patterns)
    return [path for paths in found for path in paths]


class Documents:
    """The documents of a file, as an iterable of `Document` and `Problem`.

    A plain text file is one document; other files hold one document in a field of each line or row.

    Attributes:
      position: bytes of the file read so far.
    """

    def __init__(self, path: str, field: str = "text"):
        self._path, self._field = path, field
        self._has_lines = path.removesuffix(".gz").endswith(_JSON_LINES)
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
        with gzip.open(raw) if self._path.endswith(".gz") else raw as file:
            try:
                if fault := fault_of(file.peek(1)):
                    yield Problem(1, "unreadable file", f"the file {fault}")
                    return
                for line, content in enumerate(_lines(file) if self._has_lines else _whole(file), 1):
                    self.position = raw.tell()
                    yield self._parse(line, content)
            except EOFError:
                yield Problem(
                    line + 1, "truncated gzip", "the gzip stream is cut off; the lines before were read"
                )
            except (gzip.BadGzipFile, zlib.error) as error:
                what = f"the gzip stream is damaged ({error}); the lines before were read"
                yield Problem(line + 1, "damaged gzip", what)

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
            return Problem(line, "malformed line", f"no string called {self._field!r}")
        return _checked(line, text)

    def _rows(self) -> Iterator[Document | Problem]:
        import pyarrow.parquet  # optional, and slow to import

        row = 0
        try:
            with pyarrow.parquet.ParquetFile(self._path) as file:
                if self._field not in file.schema_arrow.names:
                    names = ", ".join(file.schema_arrow.names)
                    raise ValueError(
                        f"{self._path} has no column {self._field!r}; name one of {names} with --field"
                    )
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
