"""The explanation: errors of a checkpoint's gradients under every policy of a study, beside final losses.

All cells are measured on one early checkpoint of fp8 and the same batches. A statistic that ranks the cells
as their final losses do predicts, early and on one model, what a policy will cost.
"""

import concurrent.futures
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import jax
import numpy as np
import tyro

import eval as evaluation
from analysis.diagnose.capture import LossAndGradients, make_gradients, make_pass
from analysis.diagnose.descent import LEAST_BATCHES, Descent, descent, shares
from analysis.diagnose.diagnose import check_batches
from analysis.diagnose.split import Grams, compare, split
from analysis.diagnose.wgrad import gradient_grams, total, wgrad_grams
from analysis.statistics import Estimate, t_interval
from benchmarks.study import diagnosis_file
from benchmarks.study.cells import BASELINE, Cell, policy_of
from benchmarks.study.diagnosis_tables import cells_table, compared_table, variants_table
from benchmarks.study.programs import IMPLEMENTATION
from benchmarks.study.runner import current_commit
from benchmarks.study.studies import STUDIES, matching
from models import llama
from models.configs import name_of, to_dict
from mxjax.policy import Policy
from mxjax.recipes import get_policy
from training.process.environment import enable_compilation_cache, facts, input_errors
from training.process.start import unwinding_signals

NONE = "none"
COMPILATIONS = max(1, min(4, (os.cpu_count() or 1) // 2))  # at once


def main(
    run: Annotated[pathlib.Path, tyro.conf.Positional],
    *,
    study: str = "ladder-60m",
    cells: str = "*",
    step: int | None = None,
    batches: int = 8,
    batch_size: int | None = None,
    commit: str | None = None,
    out: pathlib.Path,
) -> None:
    """Measures the cells of a study on a run's checkpoint, and Wgrad's variants; prints and keeps the tables.

    Every cell is kept once it is measured: after an interruption, the same command continues.

    Args:
      run: folder of a run of train.py, best in fp8.
      study: study whose policies to measure, or several joined by commas; "none" measures Wgrad's variants
        alone.
      cells: pattern of the names of the cells to measure, such as "wgrad*.floor.*".
      step: step of the checkpoint. Default: the last.
      batches: number of batches of the run's held-out data, at least 4, or 3 with the study "none".
      batch_size: sequences a batch; default, the run's.
      commit: commit for the record; default, the checkout's.
      out: folder for diagnosis.json, which must not be there yet, and diagnosis.partial.json before it.
    """
    enable_compilation_cache()
    commit = commit or current_commit()  # of the code that runs, whatever is edited meanwhile
    with unwinding_signals("the same command continues"), input_errors():
        names = [] if study == NONE else study.split(",")
        if unknown := [name for name in names if name not in STUDIES]:
            known = f"the studies are {', '.join(STUDIES)}, and {NONE}"
            raise ValueError(f"unknown study {', '.join(unknown)}; {known}")
        chosen = [cell for name in names for cell in STUDIES[name]]
        if cells != "*" and not chosen:
            raise ValueError(f"--cells chooses among the cells of a study; --study {NONE} has none")
        chosen = matching(chosen, cells) if chosen else []
        if chosen and batches < LEAST_BATCHES:
            raise ValueError(f"--batches must be at least {LEAST_BATCHES}, got {batches}")
        diagnosis_file.check_unfinished(out)
        arguments = evaluation.EvalConfig(run, step=step, batches=batches, batch_size=batch_size)
        restored = evaluation.restore(arguments)
        held_out = evaluation.read_batches(arguments, restored)
        check_batches(held_out)
        settings = {"run": run.name} | settings_of(restored, held_out)
        settings |= {"study": study, "commit": commit, "versions": facts()}
        settings |= {} if cells == "*" else {"pattern": cells}
        out.mkdir(parents=True, exist_ok=True)
        record = diagnosis_file.begin(out, settings)
        measure(chosen, restored, held_out, record, lambda: diagnosis_file.keep(out, record))
        diagnosis_file.finish(out, record)
    written = f"written to {out / diagnosis_file.FILE}"
    of_cells = [cells_table(record)] if record["cells"] else []
    print(*of_cells, variants_table(record), compared_table(record), written, sep="\n\n")


def settings_of(restored: evaluation.Restored, batches: Sequence[np.ndarray]) -> dict[str, Any]:
    """Returns what tells a model and batches from others."""
    digest = hashlib.sha256()
    for array in (*jax.tree.leaves(restored.params), *batches):
        digest.update(np.ascontiguousarray(array))
    return {
        "model": name_of(restored.model),
        "parameters": to_dict(restored.model)["parameters"],
        "step": restored.step,
        "policy": restored.phase.policy,
        "batches": len(batches),
        "batch_size": len(batches[0]),
        "tokens": sum(batch[:, 1:].size for batch in batches),
        "weights_and_batches": digest.hexdigest()[:16],
    }


def measure(
    cells: Sequence[Cell],
    restored: evaluation.Restored,
    batches: Sequence[np.ndarray],
    record: dict[str, Any],
    keep: Callable[[], None],
) -> None:
    """Adds to a record the splits of whole gradients by cell, and of Wgrad alone by variant, over all blocks.

    "compared" has each variant of Wgrad beside rounding to nearest with the same rule. What the record holds
    already is not measured again. `keep` is called after every cell.
    """
    key = jax.random.key(0)
    policies = {cell.label: policy_of(cell) for cell in cells}
    skipped = {name for name in policies if name in record["cells"] or policies[name] == get_policy("bf16")}
    policies = {name: policy for name, policy in policies.items() if name not in skipped}
    variants = "" if "wgrad" in record else "Wgrad's variants, and "
    print(f"to measure: {variants}{len(policies)} cells", flush=True)
    if "wgrad" not in record:
        record |= _wgrad_numbers(_wgrad_grams(restored, batches, key))
        keep()
    if not policies:
        return
    exact_run, *runs = _compiled([get_policy("bf16"), *policies.values()], restored, batches)
    exact = _gradients(exact_run, restored, batches, key)
    gradients = [one.gradients for one in exact]
    judged = descent(gradients, gradients)
    for name, run in zip(policies, runs, strict=True):
        record["cells"][name] = _cell_numbers(_gradients(run, restored, batches, key), exact, judged)
        keep()
        print(f"{name}: error {record['cells'][name]['error']['mean']:.4f}", flush=True)


def _cell_numbers(
    found: Sequence[LossAndGradients], exact: Sequence[LossAndGradients], judged: Descent
) -> dict[str, dict[str, float]]:
    """Returns the split of the whole gradients' errors, and what errors do to the loss and its descent."""
    ours, base = ([one.gradients for one in side] for side in (found, exact))
    losses = [float(a.loss) - float(b.loss) for a, b in zip(found, exact, strict=True)]
    numbers = _numbers(total(gradient_grams(ours, base))) | _all_rounded(shares(descent(ours, base), judged))
    return numbers | {"loss": _rounded(t_interval(losses))}


def _wgrad_numbers(variants: Mapping[str, Grams]) -> dict[str, Any]:
    compared = {}
    for name, grams in variants.items():
        base = f"nearest {name.split()[-1]}"
        if name != base and base in variants:
            compared[name] = _all_rounded(compare(grams, variants[base]))
    return {"wgrad": {name: _numbers(grams) for name, grams in variants.items()}, "compared": compared}


def _wgrad_grams(
    restored: evaluation.Restored, batches: Sequence[np.ndarray], key: jax.Array
) -> dict[str, Grams]:
    """Returns the inner products of the errors of Wgrad's variants over all layers, on tensors of fp8."""
    layers = llama.layer_policies(restored.model, get_policy(BASELINE))
    run = make_pass(restored.model, layers, IMPLEMENTATION)
    passes = [jax.device_get(run(restored.params, b, k)) for b, k in with_keys(batches, key)]
    return {name: total(grams) for name, grams in wgrad_grams(passes, key).items()}


def _gradients(
    run: Callable, restored: evaluation.Restored, batches: Sequence[np.ndarray], key: jax.Array
) -> list[LossAndGradients]:
    """Returns the loss and gradients of each batch, which stay on the device."""
    return [run(restored.params, batch, k) for batch, k in with_keys(batches, key)]


def with_keys(batches: Sequence[np.ndarray], key: jax.Array) -> Iterator[tuple[np.ndarray, jax.Array]]:
    """Yields the batches and the keys of their random bits, the same under every policy."""
    yield from ((batch, jax.random.fold_in(key, i)) for i, batch in enumerate(batches))


def _compiled(
    policies: Sequence[Policy], restored: evaluation.Restored, batches: Sequence[np.ndarray]
) -> list[Callable]:
    """Returns the compiled gradients under each policy.

    All are compiled, several at once, before any runs: on GPUs XLA times algorithms as it compiles, which
    breaks the graph that cuDNN records when a program first runs.
    """

    def compiled(policy: Policy) -> Callable:
        run = make_gradients(restored.model, llama.layer_policies(restored.model, policy), IMPLEMENTATION)
        return run.lower(restored.params, batches[0], jax.random.key(0)).compile()

    with concurrent.futures.ThreadPoolExecutor(COMPILATIONS) as pool:
        return list(pool.map(compiled, policies))


def _numbers(grams) -> dict[str, dict[str, float]]:
    return _all_rounded(split(grams))


def _all_rounded(parts) -> dict[str, dict[str, float]]:
    return {name: _rounded(e) for name, e in parts._asdict().items()}


def _rounded(e: Estimate) -> dict[str, float]:
    return {name: round(value, 6) for name, value in e._asdict().items() if name != "p"}
