"""Documents in files: C4's gzip JSON lines, .jsonl, plain text, parquet; and the problems found in them."""

import glob
import gzip
import json
import os
import pathlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from training.files import special_kind
from training.process.extras import check_extra

_JSON_LINES = (".json", ".jsonl")
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
        if not files and os.path.exists(pattern) and (kind := special_kind(pathlib.Path(pattern))):
            raise ValueError(f"--input {pattern} is a {kind}: write what it gives into a file, and name that")
        if not files:
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
        self.position = 0

    def __iter__(self) -> Iterator[Document | Problem]:
        found = False
        for item in self._rows() if self._path.endswith(".parquet") else self._file():
            found = True
            yield item
        self.position = os.path.getsize(self._path)
        if not found:
            yield Problem(1, "empty file", "the file holds no documents")

    def _file(self) -> Iterator[Document | Problem]:
        line = 0
        compressed = self._path.endswith(".gz")
        with open(self._path, "rb") as raw, gzip.open(raw) if compressed else raw as file:
            try:
                lines = file if self._path.removesuffix(".gz").endswith(_JSON_LINES) else _whole(file)
                for line, content in enumerate(lines, 1):
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
        if not self._path.removesuffix(".gz").endswith(_JSON_LINES):
            try:
                return _checked(line, content.decode())
            except UnicodeDecodeError as error:
                return Problem(line, "malformed text", str(error))
        try:
            parsed = json.loads(content)
        except (ValueError, RecursionError) as error:
            return Problem(line, "malformed line", str(error) if content.strip() else "a blank line")
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
                    for text in batch.column(0).to_pylist():
                        row += 1
                        self.position = size * row // rows
                        wrong = Problem(row, "malformed line", f"no string in column {self._field!r}")
                        yield _checked(row, text) if isinstance(text, str) else wrong
        except (pyarrow.ArrowInvalid, OSError) as error:
            yield Problem(row + 1, "damaged parquet", str(error))


def _whole(file: Any) -> Iterator[bytes]:
    """Yields the whole file as one piece; raises EOFError for a damaged one."""
    yield file.read()


def _checked(line: int, text: str) -> Document | Problem:
    if not text:
        return Problem(line, "empty document", "the text is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        return Problem(line, "malformed text", str(error))
    return Document(line, text)
