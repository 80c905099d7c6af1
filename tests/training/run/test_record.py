"""config.json: its checksum shows damage and edits, and the message says how to restore it."""

import dataclasses
import json
import os
import shutil
import subprocess

import pytest

from training.config import Config
from training.run.record import from_json, read_run_config, to_json, write_run_config
from training.run.resume import check_same_run

VALUES = {"config": to_json(Config(spike_factor=float("inf"))), "model": {"n_layers": 2}, "mesh": {"data": 1}}


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    write_run_config(folder, VALUES)
    return folder


def test_what_is_written_comes_back(run):
    assert read_run_config(run) == VALUES
    assert from_json(read_run_config(run)["config"]) == Config(spike_factor=float("inf"))


def test_every_cut_and_every_edit_is_noticed_and_the_copy_restores_it(run):
    path, whole = run / "config.json", (run / "config.json").read_bytes()
    assert b'"lr": 0.004' in whole
    edits = {at: whole[:at] for at in range(0, len(whole) - 2, 97)}
    edits |= {-at: whole[:at] + bytes([whole[at] ^ 2]) + whole[at + 1 :] for at in range(1, len(whole), 31)}
    edits |= {"lr": whole.replace(b'"lr": 0.004', b'"lr": 0.04'), "deep": b"[" * 100_000, "utf": b"\xff" * 9}

    def notices(content):
        path.write_bytes(content)
        try:
            found = read_run_config(run)
        except ValueError as error:
            return "; restore it: cp " in str(error)
        return {name: found[name] for name in VALUES} == VALUES  # an edit of the key "crc32" alone

    assert [name for name, content in edits.items() if not notices(content)] == []
    path.unlink()
    with pytest.raises(ValueError, match=r"it has no config.json; restore it: cp .*") as error:
        read_run_config(run)
    subprocess.run(str(error.value).partition("restore it: ")[2], shell=True, check=True)
    assert read_run_config(run) == VALUES


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "checkpoints/2/checksums.json"])
def test_a_pipe_where_a_file_should_be_is_named(run, name):
    """Reading it would never end."""
    (run / name).unlink(missing_ok=True)
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(run / name)
    with pytest.raises(ValueError, match=f"{name} is not a file: remove it"):
        read_run_config(run)


@pytest.mark.parametrize(
    "name", ["config.json", "config.copy.json", "metrics.jsonl", "spikes.jsonl", "mllog.txt"]
)
def test_a_folder_where_a_file_should_be_is_to_be_moved(run, name):
    (run / name).unlink(missing_ok=True)
    (run / name).mkdir()
    with pytest.raises(ValueError, match=f"{name} is a folder, and a run has a file there: move it away"):
        read_run_config(run)


def test_a_link_to_nothing_says_where_it_leads(run):
    path = run / "config.json"
    path.unlink()
    path.symlink_to("away/config.json")
    said = r"run.* is a link to away/config.json, which does not exist: put that file back"
    with pytest.raises(ValueError, match=f"{said}, or restore it: rm .* && cp ") as error:
        check_same_run(Config(), run)
    subprocess.run(str(error.value).partition("restore it: ")[2], shell=True, check=True)
    assert read_run_config(run) == VALUES
    (run / "metrics.jsonl").symlink_to("away/config.json")
    with pytest.raises(ValueError, match=f"{said}, or remove the link"):
        read_run_config(run)
    path.unlink()
    path.symlink_to("away/config.json")
    (run / "config.copy.json").unlink()
    with pytest.raises(ValueError, match=f"{said}$"):
        check_same_run(Config(), run)


def test_without_a_good_copy_the_message_says_so(run):
    (run / "config.json").write_text("{}")
    shutil.copyfile(run / "config.json", run / "config.copy.json")
    with pytest.raises(ValueError, match="holds no configuration; put a copy of yours back"):
        read_run_config(run)


def test_an_edit_without_a_checksum_is_taken_as_meant(run):
    path = run / "config.json"
    values = json.loads(path.read_text())
    del values["crc32"]
    values["config"]["seed"] = 7
    path.write_text(json.dumps(values))
    assert from_json(read_run_config(run)["config"]) == dataclasses.replace(
        Config(spike_factor=float("inf")), seed=7
    )


@pytest.mark.parametrize(
    "change",
    [
        {"precision": 5},
        {"optimizer": {"lr": "high"}},
        {"optimizer": VALUES["config"]["optimizer"] | {"b1": "high"}},
        {"data": None},
        {"out": []},
        {"steps": None},
        {"new": 1},
    ],
)
def test_values_of_another_kind_are_refused(change):
    with pytest.raises(ValueError, match="no configuration of this version"):
        from_json(VALUES["config"] | change)
