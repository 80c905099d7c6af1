"""Statistics of single GEMMs: beside `mxjax.stats.gemms`, and as the study's tables have them."""

import functools

import jax
import numpy as np
import pytest
import scipy.stats

import mxjax
import train as training_program
from benchmarks.study import gemm_statistics, gemm_tables
from benchmarks.study.cells import Cell
from benchmarks.study.results import gather
from mxjax.operands.use import part_of
from mxjax.policy import OPERANDS
from mxjax.products.draws import gemm_inputs
from mxjax.runtime.keys import fold
from tests.support.study_runs import record
from training.command_line import parse

KEY = jax.random.key(3)


@pytest.mark.parametrize("policy", ["fp8", "wgrad_hadamard", "full_rht", "full_sr"])
def test_errors_are_those_of_the_librarys_statistics(policy):
    policy = mxjax.get_policy(policy)
    x, w, dy = (
        jax.random.normal(jax.random.key(i), s) for i, s in enumerate(((96, 64), (64, 128), (96, 128)))
    )
    gemms = functools.partial(mxjax.stats.gemms, policy=policy, implementation="reference")
    expected = jax.jit(gemms)(x, w, dy, key=KEY)
    of_gemm = jax.jit(gemm_statistics.of_gemm, static_argnums=(0, 1))
    close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-6)
    for i, (name, gemm) in enumerate(policy.gemms.items()):
        found = of_gemm(name, gemm, x, w, dy, fold(KEY, i))
        assert set(found) == {"product", *OPERANDS[name]}
        for part, error in zip(("product", *OPERANDS[name]), getattr(expected, name), strict=True):
            ours = {field: found[part][field] for field in error._fields}
            jax.tree.map(close, ours, error._asdict())
        tensors = ((x, w), (dy, w), (x, dy))[i]
        for operand, t, how in zip(OPERANDS[name], tensors, _inputs(name, gemm, i), strict=True):
            taken = np.asarray(part_of(t, how))
            kurtosis = scipy.stats.kurtosis(taken, None, fisher=False)
            np.testing.assert_allclose(found[operand]["shape"]["kurtosis"], kurtosis, rtol=1e-4)
            largest = np.abs(np.moveaxis(taken, how.axis, -1).reshape(-1, 32)).max(axis=1)
            shares = np.histogram(2 * np.frexp(largest)[0], 16, (1, 2))[0] / len(largest)
            np.testing.assert_allclose(found[operand]["mantissas"], shares, atol=1e-6)


def _inputs(name, gemm, i):
    axes = {"fprop": (-1, -2), "dgrad": (-1, -1), "wgrad": (-2, -2)}[name]
    return gemm_inputs(gemm, *axes, fold(KEY, i))


CELLS = {
    "fp8": (2.5, 0.0),
    "fprop floor": (2.6, 0.1),
    "wgrad floor": (2.7, 0.4),
    "wgrad_hadamard floor": (2.62, 0.3),
    "wgrad_sr floor": (2.65, 0.2),
    "wgrad_rht floor": (2.66, 0.25),
    "wgrad even": (2.63, 0.5),
}
"""A final loss and an error of each cell; losses rank the cells otherwise than errors."""


def test_tables_rank_cells_by_the_means_over_their_gemms():
    cells = {name: {gemm: _numbers(gemm, error) for gemm in OPERANDS} for name, (_, error) in CELLS.items()}
    measured = {"cells": cells, "token_mean": {"mlp.down": {"x": 0.1, "dy": 0.2}}, "commit": "abc"}
    measured |= {"parameters": 1000, "policy": "fp8", "step": 2, "batches": 2, "tokens": 64}
    measured |= {"versions": {"device": "cpu"}}
    runs = []
    for name, (loss, _) in CELLS.items():
        policy, _, rules = name.partition(" ")
        cell = f"{policy}.{rules or 'own'}.60m.tuned-60m"
        runs += [record(cell, policy, seed, loss) | {"rules": rules} for seed in range(2)]
    shown = gemm_tables.gemm_prediction(gather(runs), measured)
    rows = {row.split("|")[1].strip(): row for row in shown.splitlines()}
    losses, errors = zip(*list(CELLS.values())[1:], strict=True)
    expected = scipy.stats.spearmanr(errors, losses).statistic
    assert f"| {expected:+.2f} (" in rows["error of products"]
    assert f"| {-expected:+.2f} (" in rows["projection of operands"]
    shown = gemm_tables.wgrad_operands(measured)
    assert "2 batches of 32 tokens" in shown
    assert "| wgrad `even` | 0.5000 | 0.5000 |" in shown
    assert "| mlp.down | 0.100 | 0.200 |" in gemm_tables.token_mean(measured)
    assert gemm_tables.gemm_prediction({}, None) == gemm_tables.wgrad_operands(None) == "Not measured yet."


def _numbers(gemm, e):
    shape = {"kurtosis": 3.0 + e, "outliers": e, "crest": 2.0}
    error = {"relative_error": e, "projection": 1 - e, "cosine": 1 - e}
    operand = error | {"clipped": e, "flushed": e, "shape": shape, "mantissas": [0.0625] * 16}
    return {"product": error} | {name: operand for name in OPERANDS[gemm]}


@pytest.mark.slow
def test_a_run_is_measured_once_for_each_gemm(tmp_path, monkeypatch, capsys):
    flags = ["--policy", "fp8", "--batch-size", "2", "--seq-len", "32", "--eval-batches", "1", "--steps", "2"]
    training_program.train(parse([*flags, "--warmup-steps", "1", "--out", str(tmp_path / "run")]))
    study = [Cell(name, "floor", "60m", "decay", 1) for name in ("wgrad", "wgrad_hadamard", "fprop_dgrad")]
    monkeypatch.setattr(gemm_statistics, "STUDIES", {"three": study})
    gemm_statistics.main(tmp_path / "run", study="three", out=tmp_path / "gemms.json")
    assert "5 of 5 GEMMs measured" in capsys.readouterr().out  # Fprop, Dgrad, and three kinds of Wgrad
    found = gemm_tables.read(tmp_path / "gemms.json")
    cells = found["cells"]
    assert cells["wgrad floor"]["fprop"] == cells["wgrad_hadamard floor"]["fprop"]
    assert cells["wgrad floor"]["wgrad"] != cells["wgrad_hadamard floor"]["wgrad"]
    assert 0 < cells["fprop_dgrad floor"]["wgrad"]["product"]["relative_error"] < 0.1
    assert cells["wgrad floor"]["wgrad"]["dy"]["clipped"] > 0
    assert all(0 < m[t] < 1 for m in found["token_mean"].values() for t in ("x", "dy"))
    with pytest.raises(SystemExit, match=r"gemms\.json exists; name another --out"):
        gemm_statistics.main(tmp_path / "run", study="three", out=tmp_path / "gemms.json")
    with pytest.raises(SystemExit, match="unknown study four; the studies are three"):
        gemm_statistics.main(tmp_path / "run", study="four", out=tmp_path / "x.json")
