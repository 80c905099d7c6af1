"""Runs of a model with experts: what they record, how they resume, and on a mesh."""

import json

import jax
import numpy as np
import pytest
from support.runs import lines, scalars, weights

import train as program
from training.command_line import parse

EXPERTS = {"n": 4, "active": 2, "balance_loss": 0.01, "balance_rate": 1e-3, "shared": 1}
MODEL = {"d_model": 64, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "head_dim": 16, "d_ff": 32}
MODEL |= {"experts": EXPERTS, "dense_d_ff": [0, 48]}
ATTENTION = {"windows": [8, 0], "sinks": True, "qk_norm": True, "qkv_bias": True}
FLAGS = ["--policy", "wgrad_rht", "--batch-size", "4", "--seq-len", "32", "--eval-batches", "1"]
FLAGS += ["--warmup-steps", "1", "--steps", "4", "--log-every", "1"]


@pytest.fixture
def flags(text, tmp_path):
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    return [*FLAGS, "--model-config", str(tmp_path / "model.json"), "--data", str(text)]


@pytest.mark.slow
def test_a_run_records_what_its_routers_do(tmp_path, flags, capsys):
    """In metrics.jsonl and in TensorBoard's event files, with the errors of each layer's GEMMs."""
    out = tmp_path / "run"
    more = ["--policy", "wgrad", "--stats-every", "2", "--accumulate", "2", "--tensorboard"]
    program.train(parse([*flags[2:], *more, "--out", str(out)]))
    assert "active" in capsys.readouterr().out
    found = lines(out)
    steps = [record for record in found if "loss" in record]
    assert steps[-1]["loss"] < steps[0]["loss"]
    for record in steps:
        assert record["dropped"] == 0
        assert 0 <= record["load_min"] <= 1 <= record["load_max"] <= 2
        assert 0 < record["router_entropy"] <= np.log(4) + 1e-6
    layers = next(record["layers"] for record in found if "layers" in record)
    linear = {f"blocks.{i}.attention.{name}" for i in range(2) for name in ("qkv", "out")}
    linear |= {f"blocks.1.mlp.{name}" for name in ("gate_up", "down")}
    assert set(layers) == linear | {"blocks.0.mlp.router"}
    assert all(10 < layers[name]["wgrad"]["sqnr_db"] < 30 for name in linear)
    assert sum(layers["blocks.0.mlp.router"]["load"].values()) == pytest.approx(2)
    assert np.any(weights(out)[1]["params"]["blocks"]["mlp"]["balance_bias"])
    for name in ("loss", "grad_norm", "lr", "eval_loss", "router_entropy"):
        expected = [(record["step"], pytest.approx(record[name])) for record in found if name in record]
        assert scalars(out, name) == expected != []
    measured = [(r["step"], r["layers"]["blocks.1.mlp.down"]["wgrad"]) for r in found if "layers" in r]
    sqnr = [(step, pytest.approx(wgrad["sqnr_db"])) for step, wgrad in measured]
    assert scalars(out, "blocks.1.mlp.down/wgrad/sqnr_db") == sqnr


@pytest.mark.exhaustive
def test_a_run_resumes_bit_for_bit(tmp_path, flags):
    (tmp_path / "model.json").write_text(json.dumps(MODEL | ATTENTION))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    program.train(parse([*flags, "--out", str(whole)]))
    program.train(parse([*flags, "--out", str(parts), "--stop-after", "2"]))
    program.train(parse(["--out", str(parts), "--resume"]))
    jax.tree.map(np.testing.assert_array_equal, weights(parts), weights(whole))
