"""An error or the end of one of two processes ends both, with the reason; signals end a program in order."""

import signal
import time

import pytest
from support.marks import parametrize
from support.runs import ROOT, start, start_pair

FLAGS = (
    "--distributed --batch-size 2 --seq-len 16 --eval-batches 1 --warmup-steps 1 --steps 200 --policy bf16"
)
PROGRAM = """
import os, runpy, sys, time
from training.log.reporter import RunLog
from training.process import failure
failure._SILENT = 10
traced, bad = RunLog.traced, os.environ["BAD"]

def fails(self, step, *arguments):
    if step == 4 and os.environ["JAX_PROCESS_ID"] == bad:
        print("now", time.time(), flush=True)
        raise {error}
    return traced(self, step, *arguments)

RunLog.traced = fails
runpy.run_path("train.py", run_name="__main__")
"""


def begin(tmp_path, bad: int, error: str):
    """Starts train.py as two processes, one of which raises an error before the fourth step."""
    flags = [*FLAGS.split(), "--data", ROOT / "README.md", "--out", tmp_path / f"run-{bad}"]
    arguments = ["-c", PROGRAM.replace("{error}", error), *flags]
    return start_pair(arguments, arguments, BAD=str(bad))


def ended_by(tmp_path, bad: int, error: str):
    """Returns the status and errors of both processes, which end within a minute of the error."""
    runs = begin(tmp_path, bad, error)
    outputs = [run.communicate(timeout=400) for run in runs]
    ended = time.time()
    assert "now " in outputs[bad][0], outputs
    assert ended - float(outputs[bad][0].partition("now ")[2].split()[0]) < 60
    return [run.returncode for run in runs], [errors for _, errors in outputs]


@parametrize("bad", slow=[0], exhaustive=[1])
def test_an_error_of_one_process_between_steps_ends_both(tmp_path, bad):
    status, errors = ended_by(tmp_path, bad, 'OSError(5, "Input/output error", "/data/c4.bin")')
    assert status == [1, 1], errors
    assert "train.py: error: /data/c4.bin: Input/output error" in errors[bad]
    message = f"error: process {bad}: OSError: [Errno 5] Input/output error: '/data/c4.bin'\n"
    assert errors[1 - bad].endswith(message), errors


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_other_in_one_line(tmp_path):
    status, errors = ended_by(tmp_path, 1, "os.kill(os.getpid(), 9)")
    assert status == [1, -9], errors
    said = "train.py: error: process 1 has not answered for 10 s: it was killed or stopped, or its host or "
    assert errors[0].startswith(said), errors
    assert errors[0].count("\n") == 1


# PBKDF2 is in C, as a compilation is: Python calls no handler of a signal until it returns.
NOTING = """
import hashlib, time
from training.process import interruption

interruption.GRACE = 0.5
with interruption.Interruption() as found:
    print("ready", flush=True)
    while not found.requested():
        time.sleep(0.01)
    print("noted", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", {rounds})
"""


NOTED = "interrupted: ends after this step; a signal after 0.5 s ends it at once\n"


@pytest.fixture(name="program")
def _program(request):
    with start("-c", NOTING.format(rounds=request.param)) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


@pytest.mark.parametrize("program", [10**6], indirect=True)
def test_a_signal_sent_twice_at_once_is_one(program):
    """As by `timeout uv run`, which signals the program and its group."""
    for _ in range(3):
        program.send_signal(signal.SIGTERM)
        time.sleep(0.01)
    output, errors = program.communicate()
    assert (output, errors, program.returncode) == ("noted\n", NOTED, 0)


@pytest.mark.parametrize("program", [2**31 - 1], indirect=True)
def test_a_later_signal_ends_the_program_while_it_compiles_and_says_so(program):
    program.send_signal(signal.SIGINT)
    assert program.stdout.readline() == "noted\n"
    time.sleep(0.6)
    program.send_signal(signal.SIGTERM)
    errors = program.communicate(timeout=60)[1]
    assert program.returncode == 128 + signal.SIGTERM
    assert errors == NOTED + "ended at once by another signal; continue with --resume\n"
