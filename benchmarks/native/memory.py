"""Checks of the memory that a step is estimated to need, beside what it needs, for each mode of remat."""

import re

from benchmarks.native.program import CheckFailed
from benchmarks.native.runs import peak_gib, series, step_ms
from benchmarks.native.work import Found, Work

STEPS = 5
RATIO = (0.5, 2.0)


def remat_none(work: Work) -> Found:
    """The estimate for --remat none."""
    return _remat(work, "none")


def remat_dots(work: Work) -> Found:
    """The estimate for --remat dots."""
    return _remat(work, "dots")


def remat_fp4(work: Work) -> Found:
    """The estimate for --remat fp4."""
    return _remat(work, "fp4")


def remat_full(work: Work) -> Found:
    """The estimate for --remat full."""
    return _remat(work, "full")


def _remat(work: Work, mode: str) -> Found:
    """Trains a few steps, and kills the run: neither a checkpoint nor an evaluation is wanted."""
    name = f"remat_{mode}"
    flags = ["--policy", "wgrad_hadamard", "--remat", mode, "--log-every", "1", "--steps", "400"]
    flags += ["--checkpoint-every", "400", "--eval-every", "400"]
    program = work.begin(name, *work.sizes.remat.split(), *flags, *work.data)
    work.kill_at(program, name, STEPS)
    lines = (re.match(r"memory a device, .*?: ([\d.]+) GiB", line) for line in program.lines)
    if (estimate := next((float(found[1]) for found in lines if found), None)) is None:
        raise CheckFailed(f"no estimate was printed: {program.last}")
    run = work.folder / name
    peak = peak_gib(run)
    figures = {
        "estimate_gib": estimate,
        "peak_gib": peak,
        "ratio": None if peak is None else estimate / peak,
        "step_ms": step_ms(run),
        "first_loss": series(run, "loss")[1],
    }
    return Found(figures, {"ratio": RATIO})
