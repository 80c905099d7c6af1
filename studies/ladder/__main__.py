"""Runs and reports the study of the paper's ladder.

    python -m studies.ladder run ladder-60m --out DIR --minutes 25
    python -m studies.ladder run FILE.json --out DIR --seeds 8-15    # a study of your own, see ladder/own.py
    python -m studies.ladder report DIR --add    # adds finished runs, and writes docs/study.md and its tables
    python -m studies.ladder report --check      # fails if they are not what the committed runs give
    python -m studies.ladder report DIR          # prints the tables of other runs
    python -m studies.ladder recipes             # writes docs/recipes.md; --check and DIR likewise

Finished runs are skipped, so the same command continues after an interruption. With `--minutes` no run starts
that is not expected to end in time; runs of a size that none has timed yet may take longer.
"""

import dataclasses
import itertools
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from typing import Annotated

import tyro

from studies.ladder import own, recipes_page, report
from studies.ladder import train as runner
from studies.ladder.cells import Cell
from studies.ladder.studies import STUDIES, matching
from training.command_line import command_and_flags
from training.files import absolute_path
from training.flags.ranges import at_most, check_ranges
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
    seeds: str | None = None,
    model_config: pathlib.Path | None = None,
) -> None:
    """Trains the missing runs of a study.

    Args:
      study: name in `studies.ladder.studies.STUDIES`, or several joined by commas, in that order; or a file
        of cells, NAME.json, as docs/study.md describes, whose table is printed at the end.
      out: folder of the runs' JSON files; other studies may share it.
      data: prefix of the tokenized dataset to train on, as `python -m training.tokenize` writes it.
      eval_data: prefix of the dataset to evaluate on; default, likewise.
      vocab_size: vocabulary of the models. Default: that of DATA.tokenizer.json, or else the study's, 16,384.
      minutes: time limit; default, none.
      workers: processes that share the cells, on the GPUs of CUDA_VISIBLE_DEVICES in turn, or on all.
        Two on an H200 train twice as many runs of 60m as one.
      commit: commit for the record; default, the checkout's.
      cells: pattern of the names of the cells to train, such as "wgrad.floor.*".
      seeds: number of seeds of each cell, or the seeds themselves, as 8-15; default, the study's, or four.
      model_config: shape of the model instead of the study's, as for train.py: a JSON file with the fields of
        Hugging Face's config.json or of DecoderConfig.
    """
    with input_errors():
        check_ranges({"workers": workers}, {"workers": at_most(1024)})
        if not (minutes is None or minutes > 0):
            raise ValueError(f"--minutes must be positive, got {minutes}")
        studies = {name: _cells_of(name, seeds, model_config) for name in study.split(",")}
        if workers > 1:
            sys.exit(_run_workers(workers))
        enable_compilation_cache()
        deadline = None if minutes is None else time.monotonic() + 60 * minutes
        commit = commit or runner.current_commit()
        try:
            for name, all_cells in studies.items():
                folder = absolute_path(out)
                record_name = name.removesuffix(".json").rpartition("/")[2]
                settings = runner.Settings(record_name, folder, data, eval_data, vocab_size, commit, deadline)
                if name not in STUDIES:
                    own.check_same(all_cells, folder)
                if not runner.run_cells(matching(all_cells, cells), settings):
                    break
                print(f"{name}: no run is missing, or other processes train the rest")
                if name not in STUDIES:
                    print(own.summary(all_cells, folder))
        except KeyboardInterrupt:
            sys.exit("interrupted; the same command trains what is missing")


_MOST_SEEDS = 10_000  # the file of each is looked for


def _cells_of(study: str, seeds: str | None, model_config: pathlib.Path | None) -> tuple[Cell, ...]:
    """Returns the cells of a study, or of a file of cells, with these seeds and this model.

    Raises:
      ValueError: there is no such study, or a file or the seeds are wrong.
    """
    if study not in STUDIES and not study.endswith(".json"):
        raise ValueError(f"unknown study {study}; the studies are {', '.join(STUDIES)}, or a file, NAME.json")
    is_file = study not in STUDIES
    model = None if model_config is None else absolute_path(model_config)
    cells = own.read_study(absolute_path(study), model) if is_file else STUDIES[study]
    if model is not None and not is_file:
        cells = tuple(own.with_model(cell, model) for cell in cells)
    if seeds is None:
        return cells
    wanted = _seeds(seeds)
    if isinstance(wanted, range):
        return tuple(dataclasses.replace(c, first=wanted.start, seeds=len(wanted)) for c in cells)
    return tuple(dataclasses.replace(c, seeds=wanted if is_file else min(c.seeds, wanted)) for c in cells)


def _seeds(text: str) -> int | range:
    """Returns the number of seeds, or the seeds themselves, that --seeds names."""
    found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text)
    first, last = (int(found[1]), int(found[2] or -1)) if found else (0, -1)
    wanted = range(first, last + 1) if last >= 0 else range(first)
    if not 1 <= len(wanted) <= _MOST_SEEDS:
        raise ValueError(
            "--seeds takes their number, as 8, or the first and the last, as 8-15, and at most "
            f"{_MOST_SEEDS:,}; got {text}"
        )
    return wanted if last >= 0 else first


def _run_workers(count: int) -> int:
    """Starts this command so often, on one GPU after another; returns the highest exit status.

    SIGTERM ends all of them.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [str(i) for i in range(_gpus())] if visible is None else visible.split(",")
    each = -(-count // len(devices))
    shared = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / each:.2f}"} if each > 1 else {}
    command = [sys.executable, "-m", "studies.ladder", *sys.argv[1:], "--workers", "1"]
    processes, ended = list[subprocess.Popen](), list[int]()

    def end(signum: int, _: object) -> None:
        ended.append(signum)
        for process in processes:
            process.send_signal(signum)

    signal.signal(signal.SIGTERM, end)
    for device in itertools.islice(itertools.cycle(devices), count):
        environment = os.environ | shared | {"CUDA_VISIBLE_DEVICES": device}
        processes.append(subprocess.Popen(command, env=environment))
    if ended:  # while they were started
        end(ended[0], None)
    return max(128 - status if status < 0 else status for status in [p.wait() for p in processes])


def _gpus() -> int:
    """Returns the number of GPUs, at least 1.

    Another process counts them, since JAX keeps a GPU until its process ends.

    Raises:
      ValueError: JAX cannot start.
    """
    code = "import jax; print(sum(d.platform == 'gpu' for d in jax.local_devices()))"
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    if found.returncode:
        raise ValueError(f"JAX cannot start: {found.stderr.strip().rpartition('\n')[2]}")
    return max(1, int(found.stdout))


def main() -> None:
    """Runs the subcommand that the command line names."""
    commands = {"run": run, "report": report.main, "recipes": recipes_page.main}
    command_and_flags(commands, "python -m studies.ladder", __doc__)()


if __name__ == "__main__":
    main()
