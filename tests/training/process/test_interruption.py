"""Signals to a program that notes them, in a process of its own."""

import pathlib
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[3]

PROGRAM = """
import time
from training.process import interruption

interruption.GRACE = 0.5
with interruption.Interruption() as found:
    print("ready", flush=True)
    while not found.requested():
        time.sleep(0.01)
    print("noted", flush=True)
    time.sleep({seconds})
"""


NOTED = "interrupted: ends after this step; a signal after 0.5 s ends it at once\n"


@pytest.fixture(name="program")
def _program(request):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(seconds=request.param)], cwd=ROOT, **pipes
    ) as process:
        assert process.stdout.readline() == "ready\n"
        yield process


@pytest.mark.parametrize("program", [1], indirect=True)
def test_a_signal_sent_twice_at_once_is_one(program):
    """As by `timeout uv run`, which signals the program and its group."""
    for _ in range(3):
        program.send_signal(signal.SIGTERM)
        time.sleep(0.01)
    output, errors = program.communicate()
    assert (output, errors, program.returncode) == ("noted\n", NOTED, 0)


@pytest.mark.parametrize("program", [60], indirect=True)
def test_a_later_signal_ends_the_program_and_says_so(program):
    program.send_signal(signal.SIGINT)
    assert program.stdout.readline() == "noted\n"
    time.sleep(0.6)
    program.send_signal(signal.SIGTERM)
    errors = program.communicate()[1]
    assert program.returncode == 128 + signal.SIGTERM
    assert errors == NOTED + "ended at once by another signal; continue with --resume\n"
