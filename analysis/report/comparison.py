"""The comparison of a run with its baselines, as a section of the report."""

import math
from collections.abc import Callable, Mapping, Sequence

from analysis.records import decibels, mean_sqnr
from analysis.report.page import NONE, section, short_number, table
from analysis.report.read import ReportedRun
from mxjax.policy import OPERANDS
from training.command_line import settings_of

Runs = Sequence[ReportedRun]
Values = Sequence[float | None]


def comparison(runs: Runs) -> str:
    """Returns a table of the runs' numbers, losses after equally many tokens, and settings that differ."""
    measures: dict[str, Values] = {
        "last training loss": [run.last_mean("loss") for run in runs],
        "gradient norm at the end": [run.last_mean("grad_norm") for run in runs],
        "tokens/s": [run.tokens_per_s for run in runs],
        "MFU in %": [None if (mfu := run.median("mfu")) is None else 100 * mfu for run in runs],
        "peak memory in GiB": [_gib(run.largest("memory_peak_bytes")) for run in runs],
        "spikes": [float(len(run.spikes)) for run in runs],
    }
    measures = {**_evaluations(runs), **measures}
    sqnr = {f"SQNR of {gemm} in dB": [_last_sqnr(run, gemm) for run in runs] for gemm in OPERANDS}
    rows = _rows(measures, short_number) + _rows(sqnr, lambda value: decibels(value) or NONE)
    others = [f"{runs[0].name} - {run.name}" for run in runs[1:]]
    parts = [table(["", *(run.name for run in runs), *others], rows)]
    if len({run.held_out for run in runs}) > 1:
        parts.append('<p class="note">The runs are evaluated on different tokens.</p>')
    settings = [settings_of(run.config) for run in runs]
    names = [name for name in settings[0] if len({one.get(name) for one in settings}) > 1]
    if names:
        rows = [[f"--{name.replace('_', '-')}", *(one.get(name, "") for one in settings)] for name in names]
        parts.append("<p>Settings that differ:</p>")
        parts.append(table(["", *(run.name for run in runs)], rows, words=range(1, len(runs) + 1)))
    return section("Comparison", *parts)


def _evaluations(runs: Runs) -> dict[str, Values]:
    """Returns losses and bits per byte of the sets that all runs have, after equally many tokens."""
    found: dict[str, Values] = {}
    for name in runs[0].sets:
        if not all(name in run.sets for run in runs):
            continue
        by_tokens = [{run.tokens(n): one for n, one in run.sets[name].items()} for run in runs]
        if not (common := set.intersection(*map(set, by_tokens))):
            continue
        at = max(common)
        where = f"{f' on {name}' if name else ''} after {at:,} tokens"
        found[f"validation loss{where}"] = [one[at]["eval_loss"] for one in by_tokens]
        found[f"bits per byte{where}"] = [one[at].get("eval_bits_per_byte") for one in by_tokens]
    return found


def _rows(measures: Mapping[str, Values], form: Callable[[float | None], str]) -> list[list[str]]:
    """Returns a row for each number that a run has, with the differences from the first run's."""
    return [
        [name, *map(form, values), *_differences(values)]
        for name, values in measures.items()
        if any(value is not None for value in values)
    ]


def _differences(values: Values) -> list[str]:
    finite = [None if value is None or not math.isfinite(value) else value for value in values]
    own = finite[0]
    return [NONE if own is None or other is None else short_number(own - other, "+") for other in finite[1:]]


def _gib(value: float | None) -> float | None:
    return None if value is None else value / 2**30


def _last_sqnr(run: ReportedRun, gemm: str) -> float | None:
    found = mean_sqnr([run.sqnr[max(run.sqnr)]])[gemm] if run.sqnr else math.nan
    return None if math.isnan(found) else found
