"""Files that are written completely or not at all, and messages that name the extra to install."""

import os
import pathlib

import pytest
from support.runs import file_sizes

from training.files import absolute_path, unused, write_atomically
from training.process.environment import input_errors
from training.process.start import MissingExtraError, check_extra, require


def test_a_file_is_replaced(tmp_path):
    path = tmp_path / "a.json"
    write_atomically(path, "first")
    write_atomically(path, b"second")
    assert path.read_bytes() == b"second"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_content(tmp_path, monkeypatch, step):
    path = tmp_path / "a.json"
    write_atomically(path, "old")

    def fail(*arguments):
        raise OSError("no space")

    monkeypatch.setattr(*((os, "fsync") if step == "fsync" else (pathlib.Path, "replace")), fail)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_names_the_file(tmp_path):
    with file_sizes(5), pytest.raises(OSError, match="File too large") as raised:
        write_atomically(tmp_path / "a.json", "too much")
    assert raised.value.filename == str(tmp_path / "a.json")
    with pytest.raises(FileNotFoundError) as raised:
        write_atomically(tmp_path / "none" / "a.json", "new")
    assert raised.value.filename == str(tmp_path / "none" / "a.json")


def test_a_link_at_the_temporary_name_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "a.json.tmp").symlink_to(tmp_path / "precious")
    write_atomically(tmp_path / "a.json", "new")
    assert (tmp_path / "precious").read_text() == "precious"
    assert (tmp_path / "a.json").read_text() == "new"
    assert not (tmp_path / "a.json").is_symlink()


def test_a_broken_link_is_a_name_in_use(tmp_path):
    (tmp_path / "damaged").symlink_to(tmp_path / "elsewhere")
    assert unused(tmp_path / "damaged") == tmp_path / "damaged-2"


def test_a_path_means_the_same_in_every_folder(tmp_path, monkeypatch):
    (tmp_path / "real" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real" / "inner")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    found = {path: str(absolute_path(path)) for path in ("~/a", "./a", "a/~", "link/a", "link/../a", "/a//b")}
    assert found == {
        "~/a": "/home/me/a",
        "./a": f"{tmp_path}/a",
        "a/~": f"{tmp_path}/a/~",
        "link/a": f"{tmp_path}/link/a",
        "link/../a": f"{tmp_path}/real/a",
        "/a//b": "/a/b",
    }
    with pytest.raises(ValueError, match=r"~nobody-here/a: there is no such user; write ./~nobody-here/a"):
        absolute_path("~nobody-here/a")


def test_what_is_missing_names_its_extra():
    check_extra("train", "training", "jax")
    assert require("train", "training", "json").dumps([]) == "[]"
    with pytest.raises(MissingExtraError, match=r"--plot needs no_such_module: .*pip install -e '.\[plot\]'"):
        require("plot", "--plot", "no_such_module.part")
    with pytest.raises(SystemExit, match="uv sync --extra plot"), input_errors():
        check_extra("plot", "--plot", "no_such_module")
