"""TensorBoard's event files, read back by TensorBoard's own reader."""

import importlib.util
import json
import resource

import pytest
from support.runs import event_files, scalars

import train as training_program
from training.command_line import parse
from training.log.metrics import MetricsLog
from training.log.sinks import EventFiles


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


def test_a_full_disk_is_an_error_and_no_hang(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        events = EventFiles(tmp_path)
        with pytest.raises(OSError, match="File too large"):
            events.write(1, {"policy": "fp8" * 10_000})
        events.close(failed=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


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
