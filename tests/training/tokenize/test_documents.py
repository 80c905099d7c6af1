"""Text read from each format: nothing is left out without being named."""

import gzip
import json
import pathlib

import pytest

from training.tokenize.documents import Document, Documents, Problem, below, find_files


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
    line("zwei € 😀"),
]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.json.gz", "a.jsonl.gz"])
def test_json_lines(tmp_path, name):
    content = b"".join(LINES)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
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


def test_a_last_line_without_a_newline_is_read(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(line("one") + line("two").rstrip())
    assert found(tmp_path / "a.jsonl") == [(1, "one"), (2, "two")]


def test_another_field(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "one"}\n')
    assert found(tmp_path / "a.jsonl", field="content") == [(1, "one")]
    assert found(tmp_path / "a.jsonl") == [(1, "malformed line", "no string called 'text'")]


def test_a_truncated_gzip_gives_the_lines_before(tmp_path):
    lines = [line(f"document {i} {'x' * (i * 7919 % 997)}") for i in range(400)]
    content = gzip.compress(b"".join(lines))
    (tmp_path / "a.json.gz").write_bytes(content[: len(content) // 2])
    *documents, problem = found(tmp_path / "a.json.gz")
    assert 50 < len(documents) < 350
    assert all(isinstance(d, Document) for d in documents)
    assert problem[:2] == (len(documents) + 1, "truncated gzip")


def test_a_damaged_gzip_is_named(tmp_path):
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
    texts = [found(path)[0] for path in sorted(tmp_path.iterdir())]
    assert [t[:2] for t in texts] == [
        (1, "one\n\ntwo\n"),
        (1, "three"),
        (1, "malformed text"),
        (1, "empty document"),
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
    assert [item[:2] for item in items] == [
        (1, "one"),
        (2, "oversized document"),
        (3, "three"),
        (4, "oversized document"),
    ]
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"x" * 51))
    assert found(tmp_path / "a.txt.gz") == [(1, "oversized document", "it has more than 50 bytes")]


def test_a_file_without_lines_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    assert found(tmp_path / "a.jsonl") == [(1, "empty file", "the file holds no documents")]


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = ["one", None, "", *(f"row {i}" for i in range(2000))]
    parquet.write_table(pyarrow.table({"text": rows, "other": [1] * len(rows)}), tmp_path / "a.parquet")
    items = found(tmp_path / "a.parquet")
    assert items[0] == (1, "one")
    assert [item[:2] for item in items[1:3]] == [(2, "malformed line"), (3, "empty document")]
    assert items[3:] == [(i + 4, f"row {i}") for i in range(2000)]
    with pytest.raises(ValueError, match=r"no column 'body'; name one of text, other with --field"):
        found(tmp_path / "a.parquet", field="body")
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(content[:-100])
    assert [item[:2] for item in found(tmp_path / "b.parquet")] == [(1, "damaged parquet")]


def test_a_row_of_parquet_that_is_not_utf_8_is_named_and_skipped(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = pyarrow.array([b"one", b"caf\xe9", b"three"], pyarrow.binary()).view(pyarrow.string())
    for name, column in (("a", rows), ("b", rows.dictionary_encode())):
        parquet.write_table(pyarrow.table({"text": column}), tmp_path / f"{name}.parquet")
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
    for name in ("b.jsonl", "a.jsonl", "c.txt", "notes.md"):
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
    for name in ("t.idx", "t.bin", "t.json", "t.tokenizer.json"):
        (tmp_path / "tokens" / name).write_text("x")
    assert [pathlib.Path(f).name for f in below([f"{tmp_path.parent}/{tmp_path.name}*"])] == [
        "d.txt",
        "e.txt",
    ]
    assert names(f"{folder}/**/*.txt") == ["c.txt", "d.txt", "e.txt"]


@pytest.mark.parametrize(
    ("pattern", "message"), [("missing*", "matches no file"), ("notes.md", "the files read are .json.gz")]
)
def test_what_cannot_be_read_is_an_error(tmp_path, pattern, message):
    (tmp_path / "notes.md").write_text("x")
    with pytest.raises(ValueError, match=message):
        find_files([str(tmp_path / pattern)])
