"""Trains the cells of a study; each finished run is one JSON file, and existing files are not repeated.

All policies of a seed have the same initial weights and the same batches. All seeds of a cell share one
compilation, except where train.py trains them. Several processes, one a GPU, share the cells through file
locks.
"""

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import math
import os
import pathlib
import subprocess
import time
from collections.abc import Sequence
from typing import IO, Any

import jax
import numpy as np

from studies.ladder.cells import Cell, model_of, own_parts, protocol_of
from studies.ladder.programs import IMPLEMENTATION, Programs, held_out_batches
from studies.ladder.results import Run, read_record
from studies.ladder.whole_runs import WholeRuns, is_whole_run
from training.config import DataConfig
from training.data.megatron import MegatronCorpus, load_megatron
from training.files import write_atomically
from training.log.metrics import json_line
from training.process.environment import facts

_COMPILATION = 60.0  # seconds to allow at most for each
VOCABULARY = 16_384
"""The vocabulary of the study's data, for data without a tokenizer beside it."""
LATE = "{}: no time left for another run; the same command continues later (more --minutes if none ran)"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a study.

    Attributes:
      study: name for the record.
      out: folder of the runs' JSON files.
      data, eval_data: prefixes of tokenized datasets.
      vocab_size: vocabulary of the models; None for that of the data's tokenizer, or else VOCABULARY.
      commit: commit of the code, for the record.
      deadline: `time.monotonic()` by which every run must have ended; None for no limit.
    """

    study: str
    out: pathlib.Path
    data: str
    eval_data: str
    vocab_size: int | None
    commit: str
    deadline: float | None = None


def run_path(out: pathlib.Path, cell: Cell, seed: int) -> pathlib.Path:
    """Returns the path of one run's file."""
    return out / f"{cell.name}.s{seed}.json"


def missing_seeds(out: pathlib.Path, cell: Cell) -> list[int]:
    """Returns the seeds of a cell that have no file yet."""
    return [seed for seed in cell.seed_numbers if not run_path(out, cell, seed).exists()]


def run_cells(cells: Sequence[Cell], settings: Settings) -> bool:
    """Trains the missing runs in order; returns False if the time did not suffice.

    Skips cells that another process is training. A cell is compiled while the one before it trains.

    Raises:
      ValueError: the data cannot be read or is too short for a cell, and nothing is written; or a recipe has
        no effect on its model.
    """
    data = DataConfig((settings.data,), (settings.eval_data,), settings.vocab_size)
    corpus = load_megatron(data, VOCABULARY)
    for protocol in {protocol_of(cell) for cell in cells}:
        held_out_batches(corpus.validation, protocol)
    settings.out.mkdir(parents=True, exist_ok=True)
    wanted, left = sum(cell.seeds for cell in cells), sum(len(missing_seeds(settings.out, c)) for c in cells)
    print(f"{settings.study}: {left} of {wanted} runs left", flush=True)
    _warn_of_other_data(cells, settings.out, corpus.facts["crc32"])
    with concurrent.futures.ThreadPoolExecutor(1) as compiler:
        claim, programs = _claim_next(cells, settings.out), None
        while claim is not None:
            cell, lock = claim
            with lock:
                if programs is None:
                    if not _fits(cell, settings, compilations=1):
                        print(LATE.format(cell.name), flush=True)
                        return False
                    programs = compiler.submit(_prepare, cell, corpus, data)
                ready, programs = programs.result(), None
                following = None
                if _has_time_for_another(cell, settings):
                    following = _claim_next(cells, settings.out)
                if following is not None:
                    programs = compiler.submit(_prepare, following[0], corpus, data)
                if not _run_cell(cell, cells, corpus, ready, settings):
                    return False
            claim = following or _claim_next(cells, settings.out)
    return True


def _warn_of_other_data(cells: Sequence[Cell], out: pathlib.Path, crc32: int | str) -> None:
    """Says so if finished runs of the cells were trained on other data."""
    paths = [run_path(out, cell, seed) for cell in cells for seed in cell.seed_numbers]
    others = [path for path in paths if path.exists() and read_record(path)["data"]["crc32"] != crc32]
    if others:
        where = f"{len(others)} finished runs in {out}, such as {others[0].name}"
        print(
            f"warning: {where}, are of other data than --data and --eval-data; name another --out", flush=True
        )


def _run_cell(
    cell: Cell,
    cells: Sequence[Cell],
    corpus: MegatronCorpus,
    programs: Programs | WholeRuns,
    settings: Settings,
) -> bool:
    """Trains the missing seeds of a cell; returns whether the time sufficed."""
    for seed in missing_seeds(settings.out, cell):
        if not _fits(cell, settings, compilations=programs.compilations_a_run):
            print(LATE.format(cell.name), flush=True)
            return False
        record = {"study": settings.study, "commit": settings.commit}
        record |= _record(cell, seed, corpus, programs)
        _keep(run_path(settings.out, cell, seed), record)
        left = sum(len(missing_seeds(settings.out, c)) for c in cells)
        print(
            f"{cell.name} seed {seed}: final loss {record['final_loss']:.4f}, {record['seconds']:.1f} s; "
            f"{left} runs left, about {remaining_seconds(cells, settings.out) / 60:.0f} min of one device "
            "besides compiling",
            flush=True,
        )
    return True


def _keep(path: pathlib.Path, record: dict[str, Any]) -> None:
    try:
        write_atomically(path, json_line(record) + "\n")
    except OSError as error:
        reason = f"{path} cannot be written: {error.strerror}"
        raise ValueError(f"{reason}. This run is lost; the same command trains it again") from error


def _prepare(cell: Cell, corpus: MegatronCorpus, data: DataConfig) -> Programs | WholeRuns:
    """Returns what trains the cell's seeds; compiles it unless every run has programs of its own."""
    if not is_whole_run(cell):
        return Programs(cell, corpus)
    p = protocol_of(cell)
    held_out = len(held_out_batches(corpus.validation, p)) * p.batch
    return WholeRuns(cell, data, IMPLEMENTATION, held_out)


def _record(cell: Cell, seed: int, corpus: MegatronCorpus, programs: Programs | WholeRuns) -> dict[str, Any]:
    p = programs.protocol
    outcome = programs.train(seed)
    losses, evaluations, finite = outcome["losses"], outcome["evaluations"], outcome["finite"]
    parts = np.array_split(np.array(losses), p.evaluations)
    return {
        "cell": cell.name,
        "policy": cell.policy,
        "rules": cell.rules,
        "seed": seed,
        "model": cell.model,
        "parameters": dataclasses.replace(model_of(cell), vocab_size=corpus.vocab_size).n_params,
        "protocol": {"name": cell.protocol, **dataclasses.asdict(p)},
        "resolved_policy": programs.policy,
        **own_parts(cell),
        "implementation": IMPLEMENTATION,
        "tokens": len(losses) * p.batch * p.seq,
        "final_loss": evaluations[-1][1] if finite else float("nan"),
        "evaluations": evaluations,
        "train_losses": [round(float(x.mean()), 5) for x in parts if x.size],
        "finite": finite,
        "seconds": round(outcome["seconds"], 2),
        "compile_seconds": programs.compile_seconds,
        "step_bytes": programs.step_bytes,
        "data": corpus.facts | {"source": os.path.basename(corpus.source)},
        "device": jax.devices()[0].device_kind,
        "versions": facts(),
    }


def remaining_seconds(cells: Sequence[Cell], out: pathlib.Path) -> float:
    """Estimates the time of the missing runs on one device from the existing runs; NaN if there are none.

    Compiling is left out: most of it passes while the cell before trains.
    """
    timed = [_seconds_a_token(cell, out) for cell in cells]
    known = [t for t in timed if t]
    typical = sum(known) / len(known) if known else math.nan
    return sum(
        len(missing_seeds(out, cell)) * protocol_of(cell).tokens * (t or typical)
        for cell, t in zip(cells, timed, strict=True)
    )


def current_commit() -> str:
    """Returns the commit of the checkout, marked if files differ from it; "unknown" outside git.

    Files in docs/results do not count, since the runs themselves are there, and of new ones only Python's.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("diff", "--name-only", "HEAD", "--", ":/", ":(top,exclude)docs/results")
        new = git("ls-files", "--others", "--exclude-standard", "--", ":(top)*.py")
        return git("rev-parse", "HEAD") + ("+changes" if changed or new else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _fits(cell: Cell, settings: Settings, *, compilations: int) -> bool:
    """Whether a run of the cell, with so many compilations, is expected to end before the deadline."""
    seconds = _run_seconds(cell, settings.out) or 0.0
    return _ends_in_time(seconds + compilations * _compilation_seconds(cell, settings.out), settings)


def _has_time_for_another(cell: Cell, settings: Settings) -> bool:
    """Whether another cell is expected to compile and to finish a run after the cell's missing runs."""
    if settings.deadline is None:
        return True
    seconds = _run_seconds(cell, settings.out)
    runs = len(missing_seeds(settings.out, cell)) + 1
    compilation = _compilation_seconds(cell, settings.out)
    return seconds is not None and _ends_in_time(runs * seconds + compilation, settings)


def _ends_in_time(seconds: float, settings: Settings) -> bool:
    return settings.deadline is None or time.monotonic() + seconds < settings.deadline


def _run_seconds(cell: Cell, out: pathlib.Path) -> float | None:
    """Returns the time to allow for a run, None if no run of the model has been timed."""
    per_token = _seconds_a_token(cell, out)
    return None if per_token is None else 1.15 * protocol_of(cell).tokens * per_token


def _seconds_a_token(cell: Cell, out: pathlib.Path) -> float | None:
    """Returns the slowest of a few runs of the same model, None if there are none."""
    return max((record["seconds"] / record["tokens"] for record in _some_records(cell, out)), default=None)


def _compilation_seconds(cell: Cell, out: pathlib.Path) -> float:
    """Returns the time to allow for a compilation: twice the slowest of a few of the same model."""
    known = [record["compile_seconds"] for record in _some_records(cell, out) if record["compile_seconds"]]
    return min(2 * max(known, default=math.inf), _COMPILATION)


def _some_records(cell: Cell, out: pathlib.Path) -> list[Run]:
    return [read_record(path) for path in sorted(out.glob(f"*.{cell.model}.*.json"))[-8:]]


def _claim_next(cells: Sequence[Cell], out: pathlib.Path) -> tuple[Cell, IO[str]] | None:
    """Returns the first cell with missing runs that nobody trains, and a file whose lock claims it."""
    for cell in cells:
        if not missing_seeds(out, cell):
            continue
        lock = (out / f".{cell.name}.lock").open("w")
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if missing_seeds(out, cell):  # nobody finished it meanwhile
                return cell, lock
        lock.close()
    return None
