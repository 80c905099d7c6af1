"""The explanation: errors of a checkpoint's gradients under every policy of a study, beside final losses.

All cells are measured on one early checkpoint of fp8 and the same batches. A statistic that ranks the cells
as their final losses do predicts, early and on one model, what a policy will cost.
"""

import concurrent.futures
import contextlib
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import jax
import numpy as np
import tyro

import eval as evaluation
from benchmarks.study.cells import BASELINE, Cell, policy_of
from benchmarks.study.programs import IMPLEMENTATION
from benchmarks.study.results import CellResult, baseline, by_group
from benchmarks.study.runner import current_commit
from benchmarks.study.studies import STUDIES
from benchmarks.study.tables import interval, number
from models import llama
from models.configs import name_of, to_dict
from mxjax.kernels.tables import table
from mxjax.policy import Policy
from mxjax.recipes import get_policy
from training.diagnosis.capture import Gradients, make_gradients, make_pass
from training.diagnosis.split import Grams, compare, split
from training.diagnosis.wgrad import gradient_grams, total, wgrad_grams
from training.environment import enable_compilation_cache, facts, input_errors
from training.files import write_atomically
from training.paired_statistics import rank_correlation

FILE = "diagnosis.json"
NONE = "none"
STATISTICS = {
    "error": "relative error",
    "repeating_share": "share that repeats",
    "along": "repeating error along the gradient",
    "across": "repeating error across the gradient",
    "gradient_over_noise": "gradient over sqrt(3) noise",
}
_COMPILATIONS = 4  # at once
LEAST_CELLS = 5
"""The smallest number of cells for which a rank correlation is shown."""


def main(
    run: Annotated[pathlib.Path, tyro.conf.Positional],
    *,
    study: str = "ladder-60m",
    step: int | None = None,
    batches: int = 8,
    batch_size: int | None = None,
    commit: str | None = None,
    out: pathlib.Path,
) -> None:
    """Measures the cells of a study on a run's checkpoint, and Wgrad's variants; prints and keeps the tables.

    Args:
      run: folder of a run of train.py, best in fp8.
      study: study whose policies to measure; "none" measures Wgrad's variants alone.
      step: step of the checkpoint. Default: the last.
      batches: number of batches of the run's held-out data, at least 3.
      batch_size: sequences a batch; default, the run's.
      commit: commit for the record; default, the checkout's.
      out: folder for diagnosis.json, which must not be there yet.
    """
    enable_compilation_cache()
    commit = commit or current_commit()  # of the code that runs, whatever is edited meanwhile
    with input_errors():
        if study not in STUDIES and study != NONE:
            raise ValueError(f"unknown study {study}; the studies are {', '.join(STUDIES)}, and {NONE}")
        if (out / FILE).exists():
            raise ValueError(f"{out / FILE} exists; name another --out")
        arguments = evaluation.EvalConfig(run, step=step, batches=batches, batch_size=batch_size)
        restored = evaluation.restore(arguments)
        held_out = evaluation.read_batches(arguments, restored)
        found = measure(STUDIES.get(study, ()), restored, held_out)
    record = {
        "run": run.name,
        "model": name_of(restored.model),
        "parameters": to_dict(restored.model)["parameters"],
        "step": restored.step,
        "policy": restored.phase.policy,
        "batches": len(held_out),
        "tokens": sum(batch[:, 1:].size for batch in held_out),
        "study": study,
        "commit": commit,
        "versions": facts(),
    }
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / FILE, json.dumps(record | found, indent=1) + "\n")
    print(variants_table(read(out)), compared_table(read(out)), f"written to {out / FILE}", sep="\n\n")


def measure(
    cells: Sequence[Cell], restored: evaluation.Restored, batches: Sequence[np.ndarray]
) -> dict[str, Any]:
    """Returns the splits of whole gradients by cell, and of Wgrad alone by variant, over all blocks.

    "compared" has each variant of Wgrad beside rounding to nearest with the same rule.
    """
    key = jax.random.key(0)
    policies = {f"{cell.policy} {cell.rules}".strip(): policy_of(cell) for cell in cells}
    policies = {name: policy for name, policy in policies.items() if policy != get_policy("bf16")}
    splits = {}
    with _compiled([get_policy("bf16"), *policies.values()] if policies else [], restored, batches) as runs:
        variants = _wgrad_grams(restored, batches, key)
        exact = _gradients(next(runs), restored, batches, key) if policies else []
        for name, run in zip(policies, runs, strict=True):
            grams = gradient_grams(_gradients(run, restored, batches, key), exact)
            splits[name] = _numbers(total(grams))
            print(f"{name}: error {splits[name]['error']['mean']:.4f}", flush=True)
    compared = {}
    for name, grams in variants.items():
        base = f"nearest {name.split()[-1]}"
        if name != base and base in variants:
            compared[name] = _rounded(compare(grams, variants[base]))
    wgrad = {name: _numbers(grams) for name, grams in variants.items()}
    return {"cells": splits, "wgrad": wgrad, "compared": compared}


def _wgrad_grams(
    restored: evaluation.Restored, batches: Sequence[np.ndarray], key: jax.Array
) -> dict[str, Grams]:
    """Returns the inner products of the errors of Wgrad's variants over all layers, on tensors of fp8."""
    layers = llama.layer_policies(restored.model, get_policy(BASELINE))
    run = make_pass(restored.model, layers, IMPLEMENTATION)
    passes = [jax.device_get(run(restored.params, b, k)) for b, k in _with_keys(batches, key)]
    return {name: total(grams) for name, grams in wgrad_grams(passes, key).items()}


def _gradients(
    run: Callable, restored: evaluation.Restored, batches: Sequence[np.ndarray], key: jax.Array
) -> list[Gradients]:
    """Returns the gradients of each batch, which stay on the device."""
    return [run(restored.params, batch, k) for batch, k in _with_keys(batches, key)]


def _with_keys(batches: Sequence[np.ndarray], key: jax.Array) -> Iterator[tuple[np.ndarray, jax.Array]]:
    """Yields the batches and the keys of their random bits, the same under every policy."""
    yield from ((batch, jax.random.fold_in(key, i)) for i, batch in enumerate(batches))


@contextlib.contextmanager
def _compiled(
    policies: Sequence[Policy], restored: evaluation.Restored, batches: Sequence[np.ndarray]
) -> Iterator[Iterator[Callable]]:
    """Compiles the gradients under each policy, several at once, ahead of their use."""
    model = restored.model

    def compiled(policy: Policy) -> Callable:
        run = make_gradients(model, llama.layer_policies(model, policy), IMPLEMENTATION)
        return run.lower(restored.params, batches[0], jax.random.key(0)).compile()

    pool = concurrent.futures.ThreadPoolExecutor(_COMPILATIONS)
    try:
        yield pool.map(compiled, policies)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _numbers(grams) -> dict[str, dict[str, float]]:
    return _rounded(split(grams))


def _rounded(parts) -> dict[str, dict[str, float]]:
    estimates = parts._asdict().items()
    return {name: {k: round(v, 6) for k, v in e._asdict().items() if k != "p"} for name, e in estimates}


def variants_table(record: Mapping[str, Any] | None) -> str:
    """Returns the split of Wgrad's error by rounding, rotation and rule."""
    if record is None:
        return "Not measured yet."
    rows = [[name, *(_estimate(parts[key]) for key in STATISTICS)] for name, parts in record["wgrad"].items()]
    return _source(record) + "\n\n" + table("Wgrad | " + " | ".join(STATISTICS.values()), rows)


def compared_table(record: Mapping[str, Any] | None) -> str:
    """Returns each variant of Wgrad beside rounding to nearest with the same rule."""
    if record is None or "compared" not in record:
        return "Not measured yet."
    rows = []
    for name, parts in record["compared"].items():
        ratio, repeating = parts["log_ratio"], parts["repeating"]
        low, high = math.exp(ratio["low"]), math.exp(ratio["high"])
        rows.append(
            [
                name,
                number(math.exp(ratio["mean"]), ".3f"),
                interval(low, high, ".3f"),
                number(repeating["mean"], "+.4f"),
                interval(repeating["low"], repeating["high"]),
            ]
        )
    return table("Wgrad | error over nearest's | 95 % | repeating energy minus nearest's | 95 %", rows)


def cells_table(record: Mapping[str, Any] | None) -> str:
    """Returns the split of whole gradients' errors by cell."""
    if record is None:
        return "Not measured yet."
    rows = [[name, *(_estimate(parts[key]) for key in STATISTICS)] for name, parts in record["cells"].items()]
    return _source(record) + "\n\n" + table("policy, rules | " + " | ".join(STATISTICS.values()), rows)


def prediction(cells: Mapping[str, CellResult], record: Mapping[str, Any] | None) -> str:
    """Returns the rank correlation of each statistic with the final loss minus fp8's, by group of cells."""
    if record is None:
        return "Not measured yet."
    parts = []
    for (model, protocol), group in by_group(dict(cells)).items():
        base = baseline(group)
        known = [c for c in group if c is not base and c.losses and c.label in record["cells"]]
        if base is None or not known:
            continue
        gaps = [_mean(cell.losses) - _mean(base.losses) for cell in known]
        if len(known) < LEAST_CELLS:
            names = ", ".join(f"`{cell.label}`" for cell in known)
            parts.append(
                f"`{model}`, protocol `{protocol}`: {len(known)} cells have run ({names}); "
                f"a rank correlation needs at least {LEAST_CELLS}."
            )
            continue
        rows = []
        for key, name in STATISTICS.items():
            r = rank_correlation([record["cells"][cell.label][key]["mean"] for cell in known], gaps)
            rows.append(
                [name, r.n, number(r.mean, "+.2f"), interval(r.low, r.high, "+.2f"), number(r.p, ".2g")]
            )
        header = f"{model}, {protocol}: statistic | cells | rank correlation | 95 % | p"
        parts.append(table(header, rows))
    return "\n\n".join(parts)


def read(folder: pathlib.Path) -> dict[str, Any] | None:
    """Returns the record in a folder, None if there is none."""
    path = folder / FILE
    return json.loads(path.read_text()) if path.exists() else None


def _source(record: Mapping[str, Any]) -> str:
    tokens = record["tokens"] // record["batches"]
    return (
        f"{record['parameters']:,} parameters, trained in `{record['policy']}`, step {record['step']}; "
        f"{record['batches']} batches of {tokens:,} tokens; commit {record['commit'][:7]}, "
        f"{record['versions']['device']}."
    )


def _estimate(e: Mapping[str, float]) -> str:
    half = (e["high"] - e["low"]) / 2
    return number(e["mean"]) + ("" if math.isnan(half) else f" ± {half:.4f}")


def _mean(losses: Mapping[int, float]) -> float:
    return math.fsum(losses.values()) / len(losses)
