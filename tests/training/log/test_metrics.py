"""Where a run's numbers go: the log, the display, the late reporter, and the spikes found in them."""

import json
import pathlib
import re
import types

import jax.numpy as jnp
import numpy as np
import pytest

from training import memory as device_memory
from training.log import throughput
from training.log.display import Display
from training.log.metrics import MetricsLog, json_line
from training.log.reporter import RunLog, Work
from training.log.spikes import SpikeDetector, find_spikes
from training.step import StepMetrics


class Recorder:
    """Stands in for the log, the display, the guard and the spike detector."""

    skips = False

    def __init__(self):
        self.written, self.shown, self.means = [], [], []

    def write(self, **values):
        self.written.append(values)

    def step(self, step, values):
        self.shown.append(step)
        self.means.append("mean_step_s" in values)

    def check(self, *_, **__):
        pass


def reporter_to(out, flops_a_step=1e9, learning_rate=lambda step: 0.0):
    return RunLog(out, out, out, out, out, Work(2, 8, flops_a_step, learning_rate), pathlib.Path(), range(0))


def metrics(loss=1.0):
    return StepMetrics(jnp.float32(loss), jnp.float32(2.0), jnp.bool(True), jnp.int32(0), jnp.zeros((2, 1)))


def test_a_line_is_json_even_of_numbers_that_are_not_finite():
    found = json.loads(json_line({"a": float("nan"), "b": -float("inf"), "c": 1.5, "d": "x"}))
    assert found == {"a": "nan", "b": "-inf", "c": 1.5, "d": "x"}


def test_a_step_is_reported_when_the_next_one_has_been_dispatched():
    out = Recorder()
    reporter = reporter_to(out, learning_rate=lambda step: step / 10)
    reporter.step(1, None, metrics())
    assert out.written == []
    reporter.step(2, None, metrics(loss=0.5))
    reporter.flush()
    reporter.flush()
    found = [(w["step"], w["tokens"], w["loss"], w["lr"]) for w in out.written]
    assert found == [(1, 8, 1.0, 0.0), (2, 16, 0.5, 0.1)]
    assert out.shown == [1, 2]
    assert out.means == [False, True]  # the first step compiles, and says nothing of the others


@pytest.mark.parametrize("terminal", [False, True])
def test_lines_are_printed_above_a_bar_where_there_is_a_terminal(monkeypatch, capsys, terminal):
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal, raising=False)
    values = {"loss": 1.0, "tokens_per_s": 5.0, "tflops_per_device": 1.0, "grad_norm": 1.0, "lr": 0.1}
    values |= {"tflops_per_device": 1e-3, "mean_step_s": 20.0}
    with Display(steps=6, start=0, every=3) as display:
        for step in range(1, 7):
            display.step(step, types.MappingProxyType(values))
    printed = capsys.readouterr().out
    assert re.findall(r"step +(\d+)  loss 1\.0000", printed) == ["1", "3", "6"]
    assert ("6/6" in printed) == terminal


class Device:
    """Stands in for a device of some kind, with what it says of its memory."""

    def __init__(self, device_kind, **stats):
        self.device_kind = device_kind
        self.memory_stats = lambda: stats or None


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("AMD Instinct MI300X", 1307e12),
        ("AMD Instinct MI355X", 2516.6e12),
        ("NVIDIA A10", None),
        ("cpu", None),
    ],
)
def test_peaks_are_known_by_the_device_s_name(kind, peak):
    assert throughput.peak_flops(kind) == peak


def test_speeds_are_of_all_devices_or_of_each():
    found = throughput.speed(4096, 16 * 989e12, 4.0, [Device("NVIDIA H200")] * 8)
    assert found == {"tokens_per_s": 1024, "tflops_per_device": 989 / 2, "mfu": 0.5}
    assert throughput.in_words(found) == "1,024 tokens/s  MFU 50.0 %"
    found = throughput.speed(4096, 16e12, 4.0, [Device("cpu")])
    assert found == {"tokens_per_s": 1024, "tflops_per_device": 4}
    assert throughput.in_words(found) == "1,024 tokens/s  4 TFLOP/s"


def test_memory_is_as_the_device_says():
    device = Device("gpu", bytes_in_use=1, peak_bytes_in_use=3 * 2**29, bytes_limit=150 * 2**30, other=9)
    found = device_memory.memory_use(device)
    assert found == {"memory_bytes": 1, "memory_peak_bytes": 3 * 2**29}
    assert device_memory.memory_limit(device) == 150 * 2**30
    assert "peak 1.5 GiB" in throughput.in_words({"tokens_per_s": 1.0, "tflops_per_device": 1.0} | found)
    assert device_memory.memory_use(Device("cpu")) == {}
    assert device_memory.memory_limit(Device("cpu")) is None
    assert device_memory.gib(150 * 2**30) == "150"


def test_a_step_is_reported_with_its_rates(monkeypatch):
    first, second = metrics(), metrics()  # for which JAX, too, reads the clock
    clock = iter([0.0, 2.0, 2.0, 10.0, 11.0, 11.0])  # made; read and reset at each flush; reset in between
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    out = Recorder()
    reporter = reporter_to(out, flops_a_step=2e12)
    reporter.step(1, None, first)
    with reporter.pause():  # an evaluation lasts eight seconds
        pass
    reporter.step(2, None, second)
    reporter.flush()
    found = [(w["step_s"], w["tokens_per_s"], w["tflops_per_device"]) for w in out.written]
    assert found == [(2.0, 4.0, 1.0), (1.0, 8.0, 2.0)]


def test_the_time_left_is_that_of_the_steps_that_remain(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)
    values = {"loss": 1.0, "tokens_per_s": 5.0, "tflops_per_device": 1.0, "grad_norm": 1.0, "lr": 0.1}
    with Display(steps=100, start=0, every=10) as display:
        display.step(1, values)
        display.step(10, values | {"mean_step_s": 50.0})
    first, later = capsys.readouterr().out.splitlines()
    assert "left" not in first
    assert "1:15:00 left" in later


class Sink:
    """A sink whose methods may fail."""

    def __init__(self, name, error=None):
        self.name, self.error, self.closed = name, error, []

    def write(self, step, values):
        if self.error is not None:
            raise self.error

    def close(self, failed):
        self.closed.append(failed)
        self.write(0, {})


def test_every_sink_is_closed_and_the_one_that_fails_is_named(tmp_path):
    sinks = [Sink("--first"), Sink("--second", OSError(28, "No space left on device", "/x")), Sink("--third")]
    with (
        pytest.raises(OSError, match=r"No space left on device \(writing the files of --second\): '/x'"),
        MetricsLog(tmp_path / "metrics.jsonl", sinks=sinks) as log,
    ):
        log.write(step=1, loss=0.5)
    assert [sink.closed for sink in sinks] == [[True]] * 3
    with pytest.raises(OSError, match="--second"), MetricsLog(tmp_path / "metrics.jsonl", sinks=sinks):
        pass
    assert [sink.closed for sink in sinks] == [[True, True], [True, False], [True, False]]


def test_sinks_are_closed_if_the_file_cannot_be_opened(tmp_path):
    sink = Sink("--first")
    with pytest.raises(FileNotFoundError):
        MetricsLog(tmp_path / "nowhere" / "metrics.jsonl", sinks=[sink])
    assert sink.closed == [True]


def trace(steps=400, noise=0.02):
    """A run without spikes: its loss falls from 10.4 to about 3.3, its gradient norm from 8 to 0.6."""
    rng, t = np.random.default_rng(0), np.arange(1, steps + 1)
    losses = 3.1 + 7.3 * np.exp(-t / 25) + 10 / (t + 30) + noise * rng.normal(size=steps)
    norms = (0.6 + 7.4 * np.exp(-t / 40)) * np.exp(0.15 * rng.normal(size=steps))
    return losses, norms


def records(losses, norms):
    pairs = zip(losses.tolist(), norms.tolist(), strict=True)
    return [{"step": i, "loss": loss, "grad_norm": norm} for i, (loss, norm) in enumerate(pairs, 1)]


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
def test_a_run_that_learns_has_none(noise):
    assert find_spikes(records(*trace(noise=noise))) == []


def test_a_loss_or_a_norm_that_leaps_is_one_and_does_not_hide_the_next():
    losses, norms = trace()
    losses[[299, 305]], norms[299] = (4.03, 3.8), 40.0  # from 3.34; below twice the median
    losses[29] = 9.0  # from 5.3, while it falls fast
    norms[349] = 5.0
    norms[360], losses[370] = 1.1, losses[370] * 1.02  # within what one sees anyway
    losses[380] = np.nan
    found = find_spikes(records(losses, norms))
    got = [(spike.step, spike.of) for spike in found]
    assert got == [(30, ("loss",)), (300, ("loss", "grad_norm")), (306, ("loss",)), (350, ("grad_norm",))]
    assert found[1].loss_median == pytest.approx(3.16, abs=0.05)
    assert found[1].grad_norm_median == pytest.approx(0.6, rel=0.1)


@pytest.mark.parametrize(("factor", "steps"), [(None, [300, 320]), (2.0, [320]), (float("inf"), [])])
def test_they_are_written_with_their_batches(tmp_path, factor, steps):
    losses, norms = trace(330)
    losses[299], losses[319] = 4.03, 7.0
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in records(losses[:290], norms[:290]))
    )
    said = []
    with SpikeDetector(
        tmp_path, factor, lambda step: (np.zeros(1), {"windows": [step]}), said.append, 290
    ) as log:
        for step in range(291, 331):
            log.check(step, losses[step - 1], norms[step - 1])
    written = [json.loads(line) for line in (tmp_path / "spikes.jsonl").read_text().splitlines()]
    assert [(spike["step"], spike["batch"]["windows"]) for spike in written] == [(s, [s]) for s in steps]
    assert len(said) == len(steps)
