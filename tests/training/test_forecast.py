"""`--plan`: the estimate of a run's memory without a run, and what makes it fit."""

import numpy as np
import pytest
from support.runs import error_of

import train as training_program
from training.command_line import parse
from training.data.indexed_dataset import IndexedWriter
from training.run import forecast
from training.run.setup import set_up
from training.trainer import Trainer

FLAGS = ["--batch-size", "8", "--seq-len", "64", "--policy", "bf16"]


@pytest.fixture
def plan(monkeypatch, tmp_path, capsys):
    """Returns the lines of a plan for devices with so many bytes; it leaves nothing behind."""
    monkeypatch.chdir(tmp_path)

    def lines(there_is, *flags):
        monkeypatch.setattr(forecast, "memory_there_is", lambda: there_is)
        training_program.main(["--plan", *FLAGS, *flags])
        assert list(tmp_path.iterdir()) == []
        return capsys.readouterr().out.splitlines()

    return lines


def test_a_plan_has_the_estimate_of_the_run(plan, tmp_path):
    _, memory, gpus, verdict = plan(2**30)
    run = set_up(parse(["--data", __file__, "--eval-batches", "1", *FLAGS]), tmp_path / "run")
    assert memory == f"memory a device with --remat none: {Trainer(run).memory(0)}"
    assert gpus == "GPUs: H100 (80 GB) fits, H200 (141 GB) fits, MI355X (288 GB) fits"
    assert verdict == "that fits the 1 GiB of a device here (cpu)"


def test_a_plan_says_what_fits(plan):
    _, _, _, verdict, *settings = plan(13.5 * 2**20, "--mesh", "fsdp=2")
    assert verdict.startswith("that is more than the 0.0132 GiB of a device here")
    names = [line.partition(":")[0].strip() for line in settings]
    assert names == ["--remat dots --mesh fsdp=2", "--remat full --mesh fsdp=2"]
    assert ["which fits" in line for line in settings] == [False, True]


@pytest.mark.slow
def test_a_plan_tries_parts_and_more_devices(plan):
    first, _, _, _, *settings, last = plan(
        2**20, "--mesh", "fsdp=4", "--remat", "full", "--document-mask", "off"
    )
    assert first.endswith("no mask of documents")
    names = [line.partition(":")[0].strip() for line in settings]
    parts, devices = "--remat full --accumulate 2 --mesh fsdp=4", "--remat full --mesh fsdp=8"
    assert names[:3] == [parts, devices, f"{devices},context=2"]
    assert names[-1] == f"{devices},context=2,tensor=2"
    assert last.startswith("none of them fits: shorten --seq-len")


def test_a_gpu_fits_by_the_share_of_its_memory_that_jax_takes():
    assert forecast.gpus_in_words(65e9) == (
        "GPUs: H100 (80 GB) fits with XLA_PYTHON_CLIENT_MEM_FRACTION=0.92, H200 (141 GB) fits, "
        "MI355X (288 GB) fits"
    )
    few = forecast.gpus_in_words(250e9)
    assert few.startswith(
        "GPUs: H100 (80 GB) is too small, H200 (141 GB) is too small, MI355X (288 GB) fits with"
    )


def test_a_plan_checks_as_a_run_does(tmp_path):
    assert "--batch-size 6 must be a multiple" in error_of("--plan", "--batch-size", "6", "--mesh", "fsdp=4")
    with IndexedWriter(tmp_path / "data", np.uint16) as writer:
        for n in range(1, 60):
            writer.add(np.arange(n))
    flags = "--data", tmp_path / "data", "--document-mask", "on"
    assert "--document-mask on: no token ends every document" in error_of("--plan", *flags)
