"""Runs and reports the study of the paper's ladder.

    python -m studies.ladder run ladder-60m --out DIR --minutes 25
    python -m studies.ladder report DIR --add    # adds finished runs, and writes docs/study.md and its tables
    python -m studies.ladder report --check      # fails if they are not what the committed runs give
    python -m studies.ladder report DIR          # prints the tables of other runs
    python -m studies.ladder recipes             # writes docs/recipes.md; --check and DIR likewise

Finished runs are skipped, so the same command continues after an interruption. With `--minutes` no run starts
that is not expected to end in time; runs of a size that none has timed yet may take longer.
"""

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Annotated

import tyro

from studies.ladder import recipes_page, report
from studies.ladder import train as runner
from studies.ladder.cells import Cell
from studies.ladder.studies import STUDIES, matching
from training.files import absolute_path
from training.process.environment import enable_compilation_cache, input_errors


def run(
    study: Annotated[str, tyro.conf.Positional],
    *,
    out: pathlib.Path,
    data: str = "data/study/train",
    eval_data: str = "data/study/validation",
    vocab_size: int | None = None,
    minutes: float | None = None,
    workers: int = 1,
    commit: str | None = None,
    cells: str = "*",
    seeds: int | None = None,
) -> None:
    """Trains the missing runs of a study.

    Args:
      study: name in `studies.ladder.studies.STUDIES`, or several joined by commas, in that order.
      out: folder of the runs' JSON files; other studies may share it.
      data: prefix of the tokenized dataset to train on, as `python -m training.tokenize` writes it.
      eval_data: prefix of the dataset to evaluate on; default, likewise.
      vocab_size: vocabulary of the models. Default: that of DATA.tokenizer.json, or else the study's, 16,384.
      minutes: time limit; default, none.
      workers: processes that share the cells, each on its own GPU of CUDA_VISIBLE_DEVICES, or of all.
      commit: commit for the record; default, the checkout's.
      cells: pattern of the names of the cells to train, such as "wgrad.floor.*".
      seeds: seeds of each cell; default, the study's.
    """
    with input_errors():
        names = study.split(",")
        if unknown := [name for name in names if name not in STUDIES]:
            raise ValueError(f"unknown study {', '.join(unknown)}; the studies are {', '.join(STUDIES)}")
        if workers < 1 or not (minutes is None or minutes > 0) or not (seeds is None or seeds > 0):
            raise ValueError(
                f"--workers, --minutes and --seeds are positive, got {workers}, {minutes} and {seeds}"
            )
        if workers > 1:
            sys.exit(_run_workers(workers))
        enable_compilation_cache()
        deadline = None if minutes is None else time.monotonic() + 60 * minutes
        commit = commit or runner.current_commit()
        try:
            for name in names:
                settings = runner.Settings(
                    name, absolute_path(out), data, eval_data, vocab_size, commit, deadline
                )
                chosen = [_with_seeds(cell, seeds) for cell in matching(STUDIES[name], cells)]
                if not runner.run_cells(chosen, settings):
                    break
                print(f"{name}: no run is missing, or other processes train the rest")
        except KeyboardInterrupt:
            sys.exit("interrupted; the same command trains what is missing")


def _with_seeds(cell: Cell, seeds: int | None) -> Cell:
    """Returns the cell with at most so many seeds."""
    return dataclasses.replace(cell, seeds=min(cell.seeds, seeds or cell.seeds))


def _run_workers(count: int) -> int:
    """Starts this command once for each GPU; returns the highest exit status. SIGTERM ends all of them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(i) for i in range(count)]
    if len(devices) < count:
        raise ValueError(f"--workers {count} needs as many GPUs, and CUDA_VISIBLE_DEVICES is {visible}")
    command = [sys.executable, "-m", "studies.ladder", *sys.argv[1:], "--workers", "1"]
    processes, ended = list[subprocess.Popen](), list[int]()

    def end(signum: int, _: object) -> None:
        ended.append(signum)
        for process in processes:
            process.send_signal(signum)

    signal.signal(signal.SIGTERM, end)
    for device in devices[:count]:
        processes.append(subprocess.Popen(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": device}))
    if ended:  # while they were started
        end(ended[0], None)
    return max(128 - status if status < 0 else status for status in [p.wait() for p in processes])


def main() -> None:
    """Runs the subcommand that the command line names."""
    tyro.extras.subcommand_cli_from_dict(
        {
            "run": run,
            "report": report.main,
            "recipes": recipes_page.main,
        },
        prog="python -m studies.ladder",
        description=__doc__,
    )


if __name__ == "__main__":
    main()
