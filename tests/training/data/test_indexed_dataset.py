"""Megatron indexed datasets: megatron-core's own files byte by byte, and errors for broken ones."""

import pathlib
import pickle

import numpy as np
import pytest

from training.data import indexed_dataset
from training.data.indexed_dataset import IndexedDataset, IndexedWriter, token_dtype

GOLDEN = np.load(pathlib.Path(__file__).parents[2] / "golden" / "megatron.npz")


def write(prefix, documents, dtype=np.uint16):
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add(np.array(document, np.int64))
    return prefix


@pytest.mark.parametrize("name", ["a", "b", "long"])
def test_files_equal_megatrons(tmp_path, name):
    for suffix in ("bin", "idx"):
        GOLDEN[f"{suffix}/{name}"].tofile(tmp_path / f"theirs.{suffix}")
    theirs = pickle.loads(pickle.dumps(IndexedDataset(tmp_path / "theirs")))
    write(tmp_path / "ours", [theirs[i] for i in range(len(theirs))], theirs.dtype)
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == GOLDEN[f"{suffix}/{name}"].tobytes()
    assert theirs.dtype == token_dtype({"a": 1000, "b": 70_000, "long": 300}[name]) or name == "long"
    assert len(theirs[3]) == 0  # Megatron too keeps empty documents


def test_a_dataset_without_tokens_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no tokens"):
        IndexedDataset(write(tmp_path / "d", [[], []]))


def test_the_dtype_follows_the_vocabulary():
    assert [token_dtype(n) for n in (1, 65_499, 65_500)] == [np.uint16, np.uint16, np.int32]


@pytest.fixture
def prefix(tmp_path):
    return write(tmp_path / "d", [[1, 2, 3], [4], [5, 6]])


def edit(path, change):
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        (".idx", lambda b: b"\x89PNG" + b[4:], r"does not begin with .*no index of a Megatron dataset"),
        (".idx", lambda b: b[:9] + b"\2" + b[10:], "has version 2; only version 1"),
        (".idx", lambda b: b[:17] + b"\6" + b[18:], "dtype code 6 is not one of token ids"),
        (".idx", lambda b: b[:20], "is truncated: it has 20 bytes and its header takes 34"),
        (".idx", lambda b: b[:-1], r"3 sequences and 4 document bounds take 102 bytes and it has 101"),
        (".idx", lambda b: b + b"\0", "longer than it should be"),
        (".idx", lambda b: b[:34] + b"\1" + b[35:], "lengths and offsets of the sequences disagree"),
        (".bin", lambda b: b[:-2], "is truncated: the sequences of the .idx take 12 bytes and it has 10"),
        (".bin", lambda b: b + b"\0", "is longer than it should be"),
    ],
)
def test_a_broken_file_is_an_error_that_names_it(prefix, suffix, change, message):
    edit(prefix.with_suffix(suffix), change)
    with pytest.raises(ValueError, match=message) as caught:
        IndexedDataset(prefix)
    assert str(prefix.with_suffix(suffix)) in str(caught.value)


def test_modes_after_the_bounds_are_passed_over(prefix):
    edit(prefix.with_suffix(".idx"), lambda b: b + b"\0\0\0")
    assert IndexedDataset(prefix)[2].tolist() == [5, 6]


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_missing_file_is_an_error(prefix, suffix):
    prefix.with_suffix(suffix).unlink()
    with pytest.raises(ValueError, match=rf"d{suffix}: no such file; a dataset PREFIX is"):
        IndexedDataset(prefix)


def test_ids_are_checked_against_the_vocabulary(prefix, tmp_path):
    IndexedDataset(prefix).check_ids(7)
    said = r"d.bin, from token 0 on, holds the token id 6, and the vocabulary has 6"
    with pytest.raises(ValueError, match=said) as found:
        IndexedDataset(prefix).check_ids(6)
    ids = IndexedDataset(prefix).tokens
    counted = f"{np.sum(ids == 6)} of {len(ids)} are, at first number {np.argmax(ids == 6)} of these"
    assert counted in str(found.value)
    with pytest.raises(ValueError, match="holds the token id -1"):
        IndexedDataset(write(tmp_path / "n", [[-1]], np.int32)).check_ids(6)


def test_of_a_large_file_pieces_from_start_to_end_are_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed_dataset, "_SAMPLES", 4)
    monkeypatch.setattr(indexed_dataset, "_SAMPLE", 10)
    for place, found in ((0, True), (15, False), (99, True)):
        ids = np.zeros(100, np.int64)
        ids[place] = 9
        data = IndexedDataset(write(tmp_path / f"d{place}", [ids]))
        if found:
            with pytest.raises(ValueError, match="token id 9"):
                data.check_ids(9)
        else:
            data.check_ids(9)
    assert len(set(IndexedDataset(tmp_path / f"d{p}").checksum() for p in (0, 99))) == 2


def test_an_index_longer_than_a_chunk_is_checked_throughout(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed_dataset, "_CHUNK", 4)
    prefix = write(tmp_path / "d", [[i] * (i % 3) for i in range(11)])
    IndexedDataset(prefix)
    edit(prefix.with_suffix(".idx"), lambda b: b[: 34 + 4 * 9] + b"\1" + b[34 + 4 * 9 + 1 :])
    with pytest.raises(ValueError, match="disagree"):
        IndexedDataset(prefix)


def test_a_writer_that_fails_leaves_nothing_and_overwrites_nothing(prefix):
    before = prefix.with_suffix(".bin").read_bytes()
    with pytest.raises(ValueError, match="from 70000 to 70000 do not fit into uint16"):
        write(prefix, [[1], [70_000]])
    assert prefix.with_suffix(".bin").read_bytes() == before
    assert sorted(p.name for p in prefix.parent.iterdir()) == ["d.bin", "d.idx"]


def test_a_dtype_that_ids_cannot_have_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not as float32"):
        IndexedWriter(tmp_path / "d", np.float32)


def test_a_part_of_another_size_is_refused(prefix, tmp_path):
    with (
        pytest.raises(ValueError, match=r"d.bin should have 14 bytes and has 12"),
        IndexedWriter(tmp_path / "e", np.uint16) as writer,
    ):
        writer.add_file(prefix.with_suffix(".bin"), np.array([7], np.int32))
