"""Checks of runs that are killed and go on: in one process, and in two."""

import json
import math
import re
import time

from benchmarks.native.program import CheckFailed, Program
from benchmarks.native.runs import differing, final, series
from benchmarks.native.work import ZERO, Found, Work

NOTICED = 75.0
"""Seconds in which a process ends after another was killed: the 60 that are promised, and some to exit."""


def whole(work: Work) -> Found:
    """The run with checkpoints that others are compared with."""
    work.train("whole", *work.small())
    figures = {"first_loss": series(work.folder / "whole", "loss")[1]}
    figures["eval_loss"] = final(work.folder / "whole", "eval_loss")
    return Found(figures, {"eval_loss": (0.0, figures["first_loss"])})


def resume(work: Work) -> Found:
    """A process is killed in mid-run and resumed: its records and state are those of the run left alone."""
    killed = work.kill_at(work.begin("killed", *work.small()), "killed", work.sizes.kill)
    resumed = work.train("killed", "--resume")
    equal = _equality(work, "killed", "whole")
    figures = {"killed_after": killed, "resumed_at": _first_step(resumed)}
    return Found({**figures, **equal.figures}, equal.bounds)


def distributed(work: Work) -> Found:
    """Of two processes the second is killed: the first ends, and both go on from the newest checkpoint."""
    flags = [*work.small(), "--mesh", "fsdp=2"]
    first, second = work.begin_two("two_killed", *flags)
    killed = work.kill_at(second, "two_killed", work.sizes.kill)
    began = time.monotonic()
    others = work.begin_two("two_whole", *flags)  # while the first one notices
    if first.wait() == 0:
        raise CheckFailed("the other process succeeded though one was killed")
    noticed = time.monotonic() - began
    for program in others:
        program.done()
    resumed = work.begin_two("two_killed", "--resume", "--mesh", "fsdp=2")
    for program in resumed:
        program.done()
    equal = _equality(work, "two_killed", "two_whole")
    figures = {"killed_after": killed, "noticed_s": noticed, "resumed_at": _first_step(resumed[0])}
    return Found({**figures, **equal.figures}, {"noticed_s": (0.0, NOTICED), **equal.bounds})


def _equality(work: Work, run: str, other: str) -> Found:
    """Compares the records and the last states of two runs."""
    a, b = work.folder / run, work.folder / other
    states = work.start("-m", "benchmarks.native.states", a, b, name="states", JAX_PLATFORMS="cpu").done()
    figures = {"differing_records": differing(a, b), **json.loads(states.last_json)}
    return Found(figures, {"differing_records": ZERO, "differing_elements": ZERO})


def _first_step(program: Program) -> float:
    """Returns the first step that a program printed."""
    steps = (found[1] for line in program.lines if (found := re.match(r"step +(\d+)  loss", line)))
    return float(next(steps, math.nan))
