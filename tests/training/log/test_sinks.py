"""Weights & Biases, offline, and TensorBoard: their files read back, resuming, and failures."""

import importlib.util
import json
import struct
import time

import pytest
from support import runs
from support.runs import event_files, file_sizes, scalars

import train as training_program
from training.command_line import parse
from training.log.metrics import MetricsLog
from training.log.sinks import ID_FILE, EventFiles, WandbRun


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def read(folder):
    """Returns the id of each W&B run in a folder, oldest first, and its rows.

    Waits for each to have some: on a busy machine W&B's process writes after it has said that a run is over.
    """
    end, found = time.monotonic() + 30, read_once(folder)
    while not all(rows for _, rows in found) and time.monotonic() < end:
        time.sleep(0.1)
        found = read_once(folder)
    return found


def read_once(folder):
    """Returns the id of each W&B run in a folder, oldest first, and the rows that have been written.

    The files are LevelDB logs of W&B's records behind 7 bytes: pieces of (checksum, length, type), type 1 for
    a whole record; small ones have no others.
    """
    from wandb.proto.wandb_internal_pb2 import (
        Record,
    )  # takes a second, which only this module's process needs

    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda p: p.stat().st_mtime_ns):
        data, at, rows = path.read_bytes(), 7, []
        while at + 7 <= len(data):
            _, length, kind = struct.unpack_from("<IHB", data, at)
            assert kind == 1
            record = Record.FromString(data[at + 7 : at + 7 + length])
            if record.HasField("history"):
                items = record.history.item
                rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
            at += 7 + length
        found.append((path.stem.removeprefix("run-"), rows))
    return found


def log(folder, keep_steps, values):
    with MetricsLog(folder / "metrics.jsonl", keep_steps, [WandbRun(folder, {"lr": 1})]) as metrics:
        for step, more in values:
            metrics.write(step=step, **more)


@pytest.mark.slow
def test_a_resumed_run_continues_the_same_wandb_run(tmp_path):
    layers = {"blocks.0.up": {"fprop": {"sqnr_db": 18.5}}}
    log(tmp_path, 0, [(1, {"loss": 2.5}), (2, {"loss": float("inf"), "policy": "fp8", "layers": layers})])
    log(tmp_path, 1, [(2, {"loss": 1.5}), (2, {"eval_loss": 1.25})])
    (first, before), (second, after) = read(tmp_path)
    assert first == second == (tmp_path / ID_FILE).read_text().strip()
    wanted = ("_step", "loss", "eval_loss", "policy", "blocks.0.up/fprop/sqnr_db")
    before, after = ([{k: row[k] for k in wanted if k in row} for row in rows] for rows in (before, after))
    assert before[0] == {"_step": 1, "loss": 2.5}
    assert before[1] == {"_step": 2, "loss": float("inf"), "policy": "fp8", "blocks.0.up/fprop/sqnr_db": 18.5}
    assert after == [{"_step": 2, "loss": 1.5, "eval_loss": 1.25}]


def test_failures_leave_metrics_and_training_alone(tmp_path, monkeypatch, capsys):
    import wandb

    def unreachable(*, mode, **_):
        raise wandb.errors.CommError("no network\nat all")

    with monkeypatch.context() as patch:
        patch.setattr(wandb, "init", unreachable)
        log(tmp_path, 0, [(1, {"loss": 2.5})])
    printed = capsys.readouterr().err.splitlines()
    found = [line.partition("; ")[0] for line in printed]
    assert found == ["train.py: warning: W&B failed (CommError: no network at all)"] * 2
    assert printed[0].endswith("upload it with wandb sync")

    class Broken:
        def log(self, *_, **__):
            raise RuntimeError("gone")

    monkeypatch.setattr(wandb, "init", lambda **_: Broken())
    log(tmp_path, 0, [(1, {"loss": 2.5}), (2, {"loss": 1.5})])
    assert capsys.readouterr().err.count("W&B failed (RuntimeError: gone); training goes on without it") == 1
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


@pytest.mark.slow
def test_a_run_logs_what_metrics_jsonl_gets(tmp_path):
    out, shape = tmp_path / "run", tmp_path / "shape.json"
    sizes = dict.fromkeys(("d_model", "head_dim", "d_ff"), 32) | {"n_layers": 1, "vocab_size": 1}
    shape.write_text(json.dumps(sizes | {"n_heads": 1, "n_kv_heads": 1}))
    flags = f"--batch-size 2 --seq-len 8 --eval-batches 1 --steps 3 --wandb --policy bf16 --data {__file__}"
    config = parse([*flags.split(), "--model-config", str(shape), "--out", str(out), "--stop-after", "2"])
    training_program.train(config)
    training_program.train(parse(["--resume", "--out", str(out)]))
    lines = runs.lines(out)
    rows = [row for _, rows in read(out) for row in rows]
    for name in ("loss", "eval_loss"):
        expected = [(line["step"], line[name]) for line in lines if name in line]
        assert [(row["_step"], row[name]) for row in rows if name in row] == expected


def test_numbers_are_scalars_and_the_rest_is_text(tmp_path, caplog):
    with MetricsLog(tmp_path / "metrics.jsonl", sinks=[EventFiles(tmp_path)]) as log:
        log.write(step=1, loss=2.5, tokens=64)
        log.write(step=2, loss=float("inf"), tokens=128)
        log.write(
            step=2, policy="fp8", layers={"blocks.0.up": {"fprop": {"sqnr_db": 18.5, "x": {"clipped": 0.25}}}}
        )
    assert not caplog.records  # tensorboardX warned of each value that is not finite
    assert scalars(tmp_path, "loss") == [(1, 2.5), (2, float("inf"))]
    assert scalars(tmp_path, "tokens") == [(1, 64), (2, 128)]
    assert scalars(tmp_path, "blocks.0.up/fprop/sqnr_db") == [(2, 18.5)]
    assert scalars(tmp_path, "blocks.0.up/fprop/x/clipped") == [(2, 0.25)]
    [text] = event_files(tmp_path).Tensors("policy/text_summary")
    assert (text.step, text.tensor_proto.string_val[0]) == (2, b"fp8")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[1] == {"step": 2, "loss": "inf", "tokens": 128}
    assert lines[2]["layers"]["blocks.0.up"]["fprop"]["x"]["clipped"] == 0.25


def test_a_resumed_run_shows_each_step_once(tmp_path):
    with MetricsLog(tmp_path / "metrics.jsonl", sinks=[EventFiles(tmp_path)]) as log:
        for step in range(1, 6):
            log.write(step=step, loss=float(step))
    with MetricsLog(tmp_path / "metrics.jsonl", 3, [EventFiles(tmp_path, 3)]) as log:
        log.write(step=4, loss=40.0)
    assert scalars(tmp_path, "loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    assert [(line["step"], line["loss"]) for line in runs.lines(tmp_path)] == scalars(tmp_path, "loss")


def test_a_full_disk_is_an_error_and_no_hang(tmp_path):
    with file_sizes(1000):
        events = EventFiles(tmp_path)
        with pytest.raises(OSError, match="File too large"):
            events.write(1, {"policy": "fp8" * 10_000})
        events.close(failed=True)


def test_without_tensorboardx_a_run_says_what_to_install(tmp_path, monkeypatch):
    original = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tensorboardX" else original(name)
    )
    out = tmp_path / "run"
    with pytest.raises(SystemExit, match=r"pip install -e '.\[tensorboard\]'"):
        training_program.train(
            parse(["--tensorboard", "--data", __file__, "--out", str(out), "--seq-len", "8"])
        )
    assert not out.exists()
