"""Text read from each format: nothing is left out without being named."""

import gzip
import itertools
import json
import os
import pathlib
import random

import pytest

from training.process.start import MissingExtraError
from training.tokenize.documents import WRITTEN, Document, Documents, Problem, below, find_files


def found(path, **options):
    return list(Documents(str(path), **options))


def line(text):
    return json.dumps({"text": text}).encode() + b"\n"


LINES = [
    line("one"),
    b"{not json\n",
    line(""),
    b"\n",
    b'["a list"]\n',
    b'{"text": 3}\n',
    b'{"text": "\\ud83d"}\n',
    b'{"text": "\xff"}\n',
    line("zwei € 😀").rstrip(),  # the last line may lack a newline
]


@pytest.fixture
def pyarrow():
    pytest.importorskip("pyarrow.parquet")
    return pytest.importorskip("pyarrow")


def zstd(content, frame=100):
    """Returns zstd frames of so many bytes each, as parallel compressors write them."""
    pa = pytest.importorskip("pyarrow")
    frames = []
    for i in range(0, len(content), frame):
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(content[i : i + frame])
        frames.append(sink.getvalue().to_pybytes())
    return b"".join(frames)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.json.gz", "a.jsonl.gz", "a.jsonl.zst"])
def test_json_lines(tmp_path, name):
    compress = {"gz": gzip.compress, "zst": zstd}.get(name.rpartition(".")[2], bytes)
    (tmp_path / name).write_bytes(compress(b"".join(LINES)))
    items = found(tmp_path / name)
    assert [item for item in items if isinstance(item, Document)] == [(1, "one"), (9, "zwei € 😀")]
    assert [item[:2] for item in items if isinstance(item, Problem)] == [
        (2, "malformed line"),
        (3, "empty document"),
        (4, "malformed line"),
        (5, "malformed line"),
        (6, "malformed line"),
        (7, "malformed text"),
        (8, "malformed line"),
    ]


def test_another_field(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "one"}\n')
    assert found(tmp_path / "a.jsonl", field="content") == [(1, "one")]
    assert found(tmp_path / "a.jsonl") == [(1, "malformed line", "no string called 'text'")]


def test_a_list_of_documents_is_told_how_to_be_read(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"text": "one"}, {"text": "two"}]))
    [(_, kind, why)] = found(tmp_path / "a.json")
    assert (kind, why.partition("; ")[2]) == ("malformed line", "a list is no document, write each on a line")


@pytest.mark.parametrize(("suffix", "name"), [("gz", "gzip"), ("zst", "zstd")])
def test_a_truncated_stream_gives_the_lines_before(tmp_path, suffix, name):
    lines = [line(f"document {i} {'x' * (i * 7919 % 997)}") for i in range(400)]
    content = gzip.compress(b"".join(lines)) if name == "gzip" else zstd(b"".join(lines), 2**16)
    (tmp_path / f"a.json.{suffix}").write_bytes(content[: len(content) // 2])
    *documents, problem = found(tmp_path / f"a.json.{suffix}")
    assert 50 < len(documents) < 350
    assert all(isinstance(d, Document) for d in documents)
    assert problem[:2] == (len(documents) + 1, f"truncated {name}")


def test_a_damaged_stream_is_named(tmp_path):
    for content in (b"no zstd at all", zstd(line("one")) + b"and more"):
        (tmp_path / "a.json.zst").write_bytes(content)
        assert found(tmp_path / "a.json.zst")[-1].kind == "damaged zstd"
    content = bytearray(gzip.compress(b"".join(line(f"document {i}") for i in range(50))))
    content[-6] ^= 1  # of the checksum
    (tmp_path / "a.json.gz").write_bytes(content)
    items = found(tmp_path / "a.json.gz")
    assert items[-1][:2] == (len(items), "damaged gzip")
    (tmp_path / "b.json.gz").write_bytes(b"no gzip at all")
    assert [item[:2] for item in found(tmp_path / "b.json.gz")] == [(1, "damaged gzip")]


def test_a_text_file_is_a_document(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"three"))
    (tmp_path / "c.txt").write_bytes(b"\xff")
    (tmp_path / "d.txt").write_text("")
    (tmp_path / "e.md.zst").write_bytes(zstd(b"four"))
    (tmp_path / "f.py").write_text("five = 5")
    texts = [found(path)[0] for path in sorted(tmp_path.iterdir())]
    assert [t[:2] for t in texts] == [
        (1, "one\n\ntwo\n"),
        (1, "three"),
        (1, "malformed text"),
        (1, "empty document"),
        (1, "four"),
        (1, "five = 5"),
    ]


def test_a_byte_order_mark_is_not_read_as_text(tmp_path):
    for name in ("a.txt", "b.jsonl"):
        content = line("one") if name == "b.jsonl" else b"one"
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
        assert found(tmp_path / name) == [(1, "one")]
    (tmp_path / "c.jsonl.gz").write_bytes(
        gzip.compress(b"".join(LINES).decode(errors="replace").encode("utf-16"))
    )
    [problem] = found(tmp_path / "c.jsonl.gz")
    assert problem[:2] == (1, "unreadable file")
    assert "the file is in UTF-16; convert it" in problem.what


def test_a_document_without_an_end_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr("training.tokenize.documents._LARGEST", 50)
    (tmp_path / "a.jsonl").write_bytes(line("one") + line("x" * 1000) + line("three") + b"x" * 99)
    items = found(tmp_path / "a.jsonl")
    got = [item[:2] for item in items]
    assert got == [(1, "one"), (2, "oversized document"), (3, "three"), (4, "oversized document")]
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"x" * 51))
    assert found(tmp_path / "a.txt.gz") == [(1, "oversized document", "it has more than 50 bytes")]


def test_a_file_without_lines_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    assert found(tmp_path / "a.jsonl") == [(1, "empty file", "the file holds no documents")]


def test_parquet(tmp_path, pyarrow):
    rows = ["one", None, "", *(f"row {i}" for i in range(2000))]
    table = pyarrow.table({"text": rows, "other": [1] * len(rows)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    items = found(tmp_path / "a.parquet")
    assert items[0] == (1, "one")
    assert [item[:2] for item in items[1:3]] == [(2, "malformed line"), (3, "empty document")]
    assert items[3:] == [(i + 4, f"row {i}") for i in range(2000)]
    with pytest.raises(ValueError, match=r"no column 'body'; name one of text, other with --field"):
        found(tmp_path / "a.parquet", field="body")
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(content[:-100])
    assert [item[:2] for item in found(tmp_path / "b.parquet")] == [(1, "damaged parquet")]


@pytest.mark.parametrize("groups", [1, 40])
def test_parquet_is_read_in_parts(tmp_path, pyarrow, groups):
    rows = [random.Random(i).randbytes(1000).hex() for i in range(16000)]  # 16 MB when compressed
    table = pyarrow.table({"text": rows})
    sizes = {"row_group_size": len(rows) // groups, "compression": "zstd"}
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", **sizes)
    del table
    before, most = pyarrow.total_allocated_bytes(), 0
    for row, document in enumerate(Documents(str(tmp_path / "a.parquet"))):
        assert document == (row + 1, rows[row])
        if row % 100 == 0:
            most = max(most, pyarrow.total_allocated_bytes() - before)
    assert most < 10 * 2**20 < (tmp_path / "a.parquet").stat().st_size


def test_a_row_of_parquet_that_is_not_utf_8_is_named_and_skipped(tmp_path, pyarrow):
    rows = pyarrow.array([b"one", b"caf\xe9", b"three"], pyarrow.binary()).view(pyarrow.string())
    for name, column in (("a", rows), ("b", rows.dictionary_encode())):
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / f"{name}.parquet")
        items = found(tmp_path / f"{name}.parquet")
        assert [item[:2] for item in items] == [(1, "one"), (2, "malformed text"), (3, "three")]
        assert "can't decode byte 0xe9" in items[1].what


def test_positions_rise_to_the_files_size(tmp_path):
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b"".join(line(f"document {i}") for i in range(5000))))
    documents = Documents(str(tmp_path / "a.json.gz"))
    positions = [documents.position for _ in documents]
    assert positions == sorted(positions)
    assert documents.position == (tmp_path / "a.json.gz").stat().st_size


def test_files_are_found_by_name_pattern_and_folder(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.txt", "notes.doc", ".hidden.txt"):
        (tmp_path / name).write_text("x")
    folder = str(tmp_path)
    names = lambda *patterns: [pathlib.Path(f).name for f in find_files(patterns)]  # noqa: E731
    assert names(f"{folder}/*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert names(folder) == ["a.jsonl", "b.jsonl", "c.txt"]
    assert names(f"{folder}/b.jsonl", folder) == ["a.jsonl", "b.jsonl", "c.txt"]
    assert below([folder]) == []
    (tmp_path / "deeper" / "still").mkdir(parents=True)
    for path in (tmp_path / "deeper" / "d.txt", tmp_path / "deeper" / "still" / "e.txt"):
        path.write_text("x")
    assert names(folder) == ["a.jsonl", "b.jsonl", "c.txt"]
    assert [pathlib.Path(f).name for f in below([folder])] == ["d.txt", "e.txt"]
    (tmp_path / "tokens").mkdir()
    for place, suffix in itertools.product([tmp_path, tmp_path / "tokens"], WRITTEN):
        (place / f"t{suffix}").write_text("x")
    assert names(folder) == ["a.jsonl", "b.jsonl", "c.txt"]
    got = [pathlib.Path(f).name for f in below([f"{tmp_path.parent}/{tmp_path.name}*"])]
    assert got == ["d.txt", "e.txt"]
    assert names(f"{folder}/**/*.txt") == ["c.txt", "d.txt", "e.txt"]
    (tmp_path / "tokens" / "f.txt").write_text("x")  # whose folder is no reason to leave it out
    found = [pathlib.Path(f).name for f in find_files([folder], recursive=True)]
    assert found == ["a.jsonl", "b.jsonl", "c.txt", "d.txt", "e.txt", "f.txt"]


def test_a_folder_that_cannot_be_read_ends_a_recursive_search(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def closed(path):  # tests may run as root, who reads all
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    assert find_files([str(tmp_path)]) == [str(tmp_path / "a.txt")]
    with pytest.raises(PermissionError, match="closed"):
        find_files([str(tmp_path)], recursive=True)


def test_a_folder_of_a_dataset_of_hugging_face(tmp_path):
    pytest.importorskip("pyarrow")
    for name in ("README.md", ".cache/a.parquet", "data/train-00000-of-00002.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    with pytest.raises(ValueError, match=r"matches no file .*; --recursive takes those below it, such as "):
        find_files([str(tmp_path)])
    assert find_files([str(tmp_path)], recursive=True) == [str(tmp_path / name)]
    (tmp_path / "data" / "test-00000-of-00001.parquet").write_text("x")
    said = r"splits test, train of .* such as '(.*/data/train-\*-of-\*.par.*)'"
    with pytest.raises(ValueError, match=said) as e:
        find_files([str(tmp_path)], recursive=True)
    pattern = str(e.value).split("'")[1]
    assert find_files([pattern]) == [str(tmp_path / name)]


@pytest.mark.parametrize("name", ["a.parquet", "a.txt.zst"])
def test_what_needs_pyarrow_says_so(tmp_path, monkeypatch, name):
    (tmp_path / name).write_text("x")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=f"reading {pathlib.Path(name).suffix} files needs pyarrow: "):
        find_files([str(tmp_path)])


@pytest.mark.parametrize(
    ("pattern", "message"), [("missing*", "matches no file"), ("notes.doc", "the files read are .json, ")]
)
def test_what_cannot_be_read_is_an_error(tmp_path, pattern, message):
    (tmp_path / "notes.doc").write_text("x")
    with pytest.raises(ValueError, match=message):
        find_files([str(tmp_path / pattern)])
