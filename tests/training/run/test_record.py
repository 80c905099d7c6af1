"""config.json: what is written comes back, and what is no configuration is refused in one line."""

import os

import pytest

from training.config import Config
from training.run.record import documents_of_run, from_json, read_run_config, to_json, write_run_config

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


def test_every_cut_is_noticed(run):
    path, whole = run / "config.json", (run / "config.json").read_bytes()
    cuts = [whole[:at] for at in range(0, len(whole) - 2, 97)]
    crafted = [
        b'{"config": {}, "data": {}}',
        b'{"config": {}, "phases": {}}',
        b'{"config": {}, "imported": 1}',
    ]
    for content in [*cuts, b"[" * 100_000, b"\xff" * 9, b"{}", b"[]", *crafted]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"config.json is damaged: .*; put a copy of yours back"):
            read_run_config(run)
    path.unlink()
    with pytest.raises(ValueError, match=r"it has no config\.json"):
        read_run_config(run)


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "checkpoints/2/checksums.json"])
def test_a_pipe_where_a_file_should_be_is_named(run, name):
    """Reading it would never end."""
    (run / name).unlink(missing_ok=True)
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(run / name)
    with pytest.raises(ValueError, match=f"{name} is not a file: remove it"):
        read_run_config(run)


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


@pytest.mark.parametrize("end", [-1, 2**31, 10**400, 1.0])
def test_documents_end_with_a_token(end):
    with pytest.raises(ValueError, match="no documents of this version"):
        documents_of_run({"documents": {"end": end, "restart_positions": False}})
