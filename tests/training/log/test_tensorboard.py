"""TensorBoard's event files, read back by TensorBoard's own reader."""

import importlib.util
import json
import resource

import pytest
from support import runs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train as training_program
from training.command_line import parse
from training.log.metrics import MetricsLog
from training.log.sinks import EventFiles


def read(folder):
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    return events.Reload()


def scalars(folder, tag):
    return [(event.step, event.value) for event in read(folder).Scalars(tag)]


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
    [text] = read(tmp_path).Tensors("policy/text_summary")
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


@pytest.mark.slow
def test_a_run_writes_what_metrics_jsonl_gets(text, tmp_path):
    out = tmp_path / "run"
    flags = "--batch-size 2 --seq-len 32 --eval-batches 1 --warmup-steps 1 --steps 3 --tensorboard"
    flags += f" --stats-every 2 --policy wgrad --model-config {tmp_path}/shape.json"
    shape = {"d_model": 64, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "head_dim": 32, "d_ff": 96}
    (tmp_path / "shape.json").write_text(json.dumps(shape | {"vocab_size": 257}))
    training_program.train(parse([*flags.split(), "--data", str(text), "--out", str(out)]))
    lines = runs.lines(out)
    for name in ("loss", "grad_norm", "lr", "eval_loss"):
        expected = [(line["step"], pytest.approx(line[name])) for line in lines if name in line]
        assert scalars(out, name) == expected
    [measured] = [line for line in lines if "layers" in line]
    of_layer = measured["layers"]["blocks.1.mlp.down"]
    sqnr = scalars(out, "blocks.1.mlp.down/wgrad/sqnr_db")
    assert sqnr == [(2, pytest.approx(of_layer["wgrad"]["sqnr_db"]))]


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
