"""What others send: each reader refuses in one line what it cannot be; none waits or takes all memory."""

import bz2
import gzip
import lzma
import os
import pathlib

import pytest

from models.config_file import load_config
from models.huggingface.files import Reader, small_files
from models.received import fault_of, parse_json, read_json, read_text
from mxjax import Policy
from training.data.indexed_dataset import IndexedDataset
from training.data.load import load_held_out
from training.data.tokenizer import load_tokenizer, tokenizer_vocab_size
from training.flags.policy_source import load_policy
from training.huggingface.model_card import end_token
from training.tokenize.documents import Documents

TEXT = "line of a text\n" * 9
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab29\nsize 16060522240\n"


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (gzip.compress(TEXT.encode(), mtime=0), "is compressed by gzip"),
        (lzma.compress(TEXT.encode()), "is compressed by xz"),
        (bz2.compress(TEXT.encode()), "is compressed by bzip2"),
        (b"\x28\xb5\x2f\xfd\x04\x58", "is compressed by zstd"),
        (b"\x04\x22\x4d\x18\x64", "is compressed by lz4"),
        (TEXT.encode("utf-16"), "is in UTF-16; convert it: iconv -f UTF-16"),
        (TEXT.encode("utf-32"), "is in UTF-32"),
        (TEXT.encode("utf-16-le"), "holds NUL bytes"),
        (POINTER, "is a pointer of git-lfs, not the file itself; run `git lfs pull`"),
    ],
)
def test_what_is_no_text_is_told_by_its_first_bytes(head, said):
    assert said in str(fault_of(head))
    assert (fault_of(head, text=False) is None) == (head != POINTER)


@pytest.mark.parametrize("head", [b"", TEXT.encode(), b"BZhang", b"\xff\xe9", POINTER + b"x" * 1000])
def test_text_in_any_encoding_of_bytes_is_text(head):
    assert fault_of(head) is None


def documents(path: pathlib.Path):
    """Raises ValueError with the problem of a file that tokenizing skips."""
    raise ValueError(f"{path}: {list(Documents(str(path)))}")


READERS = {
    "a.txt": lambda path: load_held_out(str(path), 257, True, 4),
    "a.jsonl": documents,
    "a.json.gz": documents,
    "a.parquet": documents,
    "policy.json": lambda path: load_policy(str(path)),
    "policy.py": lambda path: load_policy(f"{path}:own"),
    "shape.json": load_config,
    "LICENSE.txt": lambda path: small_files(path.parent),
    "model.safetensors": lambda path: Reader(path.parent),
    "d.idx": lambda path: IndexedDataset(path.with_suffix("")),
    "tokenizer.json": load_tokenizer,
    "d.tokenizer.json": tokenizer_vocab_size,
    "d.json": lambda path: end_token([str(path.with_suffix("")), "other"], 257),
}


@pytest.mark.parametrize("name", READERS)
def test_a_stand_in_of_git_lfs_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(POINTER)
    with pytest.raises(ValueError, match=r"is a pointer of git-lfs.*run `git lfs pull`") as caught:
        READERS[name](tmp_path / name)
    assert name in str(caught.value)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("endless", ["pipe", "device"])
def test_what_might_never_end_is_not_opened(tmp_path, name, endless):
    if endless == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=f"{name}.* is (a {endless}|a link|not a file)|file is a {endless}"):
        READERS[name](tmp_path / name)


@pytest.mark.parametrize("name", READERS)
def test_a_hole_of_a_hundred_gigabytes_takes_no_memory(tmp_path, name):
    (tmp_path / "d.bin").touch()
    with (tmp_path / name).open("wb") as file:
        file.truncate(10**11)
    with pytest.raises(ValueError, match=name):
        READERS[name](tmp_path / name)


def test_json_is_bounded_in_depth(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("[" * 100 + "]" * 100)
    assert read_json(path)
    for depth in (101, 900, 100_000):
        path.write_text('{"a":' * depth + "1" + "}" * depth)
        with pytest.raises(ValueError, match=r"a\.json is nested too deeply"):
            read_json(path)


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "fp8.json"
    path.write_bytes(b"\xef\xbb\xbf{}")
    assert (read_text(path), parse_json(path.read_bytes())) == ("{}", {})
    assert load_policy(str(path)) == Policy()
