"""What others published of Llama 3.1 8B in MLPerf Training, as Markdown tables beside the study's."""

import collections
import json
import pathlib
import statistics
from collections.abc import Sequence

from benchmarks.study.tables import number
from mxjax.runtime.tables import table
from training import mlperf

FILE = "outside.json"
REFERENCES = (16, 32)
"""Batch sizes of the reference's runs."""


def published() -> str:
    """Returns the published loss curves of Llama 3.1 8B in MLPerf Training."""
    curves = mlperf.PUBLISHED_CURVES
    points = sorted({n for curve in curves for n in curve.losses})
    rows = [
        [f"{n:,}", *(number(curve.losses[n], ".3f") if n in curve.losses else "" for curve in curves)]
        for n in points
    ]
    return table("sequences | " + " | ".join(curve.name for curve in curves), rows)


def submissions(path: pathlib.Path) -> str:
    """Returns after how many sequences the runs of submissions, and of the reference, reached the target."""
    found = json.loads(path.read_text())["submissions"]
    rows = []
    for s in sorted(found, key=lambda s: (s["batch"], s["precision"], s["folder"])):
        last = s["first_file"] + len(s["sequences"]) - 1
        files = f"`{s['folder']}/result_{s['first_file']}.txt` to `{last}`"
        said = [s["precision"], s["batch"], s["gpus"], *_counts(s["sequences"]), f"`{s['stated_by']}`", files]
        rows.append(said)
    for runs in (mlperf.PUBLISHED_RUNS[batch] for batch in REFERENCES):
        said = ["BF16, reference", runs.batch_size, "8 B200 a node", *_counts(runs.sequences)]
        rows.append([*said, "`Precision: BF16`", "`training_6.0.0/rcps_llama31_8b.json`"])
    return table("precision | batch | GPUs | runs | sequences until 3.3 | mean | precision by | files", rows)


def _counts(sequences: Sequence[int]) -> list[object]:
    """Returns the number of runs, how many needed each number of sequences, and the mean."""
    counts = sorted(collections.Counter(sequences).items())
    shown = ", ".join(f"{n:,} ({count})" for n, count in counts)
    return [len(sequences), shown, f"{statistics.fmean(sequences):,.0f}"]
