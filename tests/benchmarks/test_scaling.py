"""The cost model of paper_models/scaling*.py by hand, and its document against it."""

import dataclasses
import json
import pathlib
import re

import pytest

from benchmarks import markdown
from benchmarks.paper_models import scaling, scaling_model
from benchmarks.paper_models.scaling_machines import MACHINES, Machine
from benchmarks.paper_models.scaling_model import Plan
from models.configs import LlamaConfig, get_config

DOCUMENT = (pathlib.Path(__file__).parents[2] / "docs" / "scaling.md").read_text()

# Round numbers: 1 TFLOP/s, 1 GB/s, 0.1 GB/s between nodes, nodes of 4.
SIMPLE = Machine(
    name="simple",
    gemm={"bf16": 1e12, "fp8": 2e12, "mxfp4": 4e12},
    attention=1e12,
    memory=1e15,  # nothing waits for it
    capacity=1e9,
    fast=1e9,
    slow=1e8,
    peak=1e12,
    node=4,
    latency=0.0,
)
# qkv 64 x 128, out 64 x 64, gate and up 64 x 192, down 96 x 64: 30,720 weights a block.
SMALL = LlamaConfig(256, 64, 2, 4, 2, 16, 96)
WEIGHTS = 64 * 128 + 64 * 64 + 64 * 192 + 96 * 64


def plan(data=1, fsdp=1, tensor=1, sequences=1, micro=1, seq=32, remat=False):
    return Plan(data, fsdp, tensor, sequences, micro, seq, remat)


def test_405b_is_metas():
    model = get_config("llama3.1-405b")
    assert (model.n_layers, model.d_model, model.n_heads, model.n_kv_heads) == (126, 16_384, 128, 8)
    assert round(model.n_params / 1e9, 1) == 405.9


def test_linear_layers_are_cut_by_tensor():
    assert scaling_model.linears(SMALL, 2) == {
        "attention.qkv": (64, 64),
        "attention.out": (32, 64),
        "mlp.gate_up": (64, 96),
        "mlp.down": (48, 64),
    }
    assert sum(a * b for a, b in scaling_model.linears(SMALL, 1).values()) == WEIGHTS


def test_gemms_by_hand():
    each = 2 * 32 * WEIGHTS * 2 / 1e12  # a GEMM of every layer of two blocks
    seconds = scaling_model.gemm_seconds
    assert seconds(SMALL, "bf16", SIMPLE, plan()) == pytest.approx(3 * each)
    assert seconds(SMALL, "fp8", SIMPLE, plan()) == pytest.approx(3 * each / 2)
    assert seconds(SMALL, "fprop", SIMPLE, plan()) == pytest.approx(each * (1 / 4 + 2 / 2))
    assert seconds(SMALL, "bf16", SIMPLE, plan(tensor=2)) == pytest.approx(3 * each / 2)
    again = 2 * 32 * (WEIGHTS - 96 * 64) * 2 / 1e12  # all but mlp.down
    assert seconds(SMALL, "bf16", SIMPLE, plan(remat=True)) == pytest.approx(3 * each + again)


def test_quantization_by_hand():
    machine = dataclasses.replace(SIMPLE, memory=1e9)
    seconds = scaling_model.quantize_seconds
    tokens_in, tokens_out = 32 * (64 + 64 + 64 + 96), 32 * (128 + 64 + 192 + 64)
    moved = (tokens_in + tokens_out) * (2 + 17 / 16) + WEIGHTS * (4 + 17 / 16)
    assert seconds(SMALL, "wgrad", machine, plan()) == pytest.approx(2 * moved / 1e9)
    sharded = (tokens_in + tokens_out) * 5 + WEIGHTS / 4 * 9  # current scaling reads twice
    assert seconds(SMALL, "fp8", machine, plan(fsdp=4)) == pytest.approx(2 * sharded / 1e9)
    carried = dataclasses.replace(machine, carried=True)
    more = (tokens_in + tokens_out + WEIGHTS) * 2 * (17 / 32 + 1)
    assert seconds(SMALL, "wgrad", carried, plan()) == pytest.approx(2 * (moved + more) / 1e9)


def test_collectives_by_hand():
    gather = scaling_model.gather_seconds
    assert gather(1e9, 1, 1, SIMPLE) == 0
    assert gather(1e9, 4, 1, SIMPLE) == pytest.approx(0.75)  # in a node
    assert gather(1e9, 2, 2, SIMPLE) == pytest.approx(0.5)
    assert gather(1e9, 8, 1, SIMPLE) == pytest.approx(0.5e9 / (4 * 1e8))  # half from another node, by 4 cards
    assert gather(1e9, 2, 4, SIMPLE) == pytest.approx(0.5e9 / 1e8)  # one a node
    slow = dataclasses.replace(SIMPLE, latency=0.1)
    assert gather(0, 12, 1, slow) == pytest.approx(0.2)  # two steps of a ring of three nodes


def test_traffic_by_hand():
    parts = scaling_model.traffic_parts(SMALL, "wgrad", SIMPLE, plan(fsdp=4, sequences=8))
    head = 256 * 64
    blocks = 2 * WEIGHTS * (2 * 17 / 32 + 4)  # gathered for Fprop and Dgrad, reduced in float32
    assert parts["fsdp"] == pytest.approx(2 * 0.75 * (blocks + head * (2 + 4)) / 1e9)  # two parts a step
    assert (parts["data"], parts["tensor"]) == (0, 0)
    parts = scaling_model.traffic_parts(SMALL, "bf16", SIMPLE, plan(data=2, tensor=2, sequences=2))
    assert parts["data"] == pytest.approx(2 * 0.5 * 4 * SMALL.n_params / 2 / 1e9)
    assert parts["tensor"] == pytest.approx(2 * 4 * 2 * 0.5 * 2 * 32 * 64 / 1e9)
    assert parts["fsdp"] == 0


def test_overlap_hides_collectives_beside_computing():
    parts = {"gemms": 8.0, "attention": 2.0, "fsdp": 9.0, "data": 1.0, "tensor": 3.0}
    assert scaling_model.seconds(parts, 0.0) == 23
    assert scaling_model.seconds(parts, 0.8) == pytest.approx(10 + 3 + 2)
    assert scaling_model.seconds(parts, 1.0) == 13


def test_memory_by_hand():
    held = scaling_model.memory_bytes(SMALL, "bf16", plan(remat=True))
    assert held["state"] == 16 * SMALL.n_params
    assert held["gathered"] == held["head"] == 0
    inside = 2 * (2 * 64 + 128 + 64 + 2 * 96) + 2 * (2 * 64 + 64 + 96)
    assert held["activations"] == 32 * (inside + 2 * 64 * 2)
    assert held["logits"] == 3 * 4 * 32 * 256
    held = scaling_model.memory_bytes(SMALL, "bf16", plan(fsdp=2, tensor=2, sequences=4))
    assert held["state"] == 20 * SMALL.n_params / 4  # gradients of two parts are added up
    assert held["gathered"] == (2 * (2 + 2) + 4) * WEIGHTS / 2
    assert held["head"] == (2 + 4) * 256 * 64 / 2
    assert scaling_model.memory_bytes(SMALL, "bf16", plan(tensor=2))["head"] == 0
    for mesh in ({"fsdp": 2}, {"data": 2}):
        held = scaling_model.memory_bytes(SMALL, "bf16", plan(**mesh, sequences=4))
        assert held["head"] == (2 + 4 + 4) * 256 * 64


def test_what_does_not_fit_has_no_plan():
    tiny_memory = dataclasses.replace(SIMPLE, capacity=1e6)
    assert scaling_model.best_plan(SMALL, "bf16", tiny_memory, 1, 4, 32) is None
    sharded = scaling_model.best_plan(SMALL, "bf16", tiny_memory, 16, 16, 32)
    assert sharded is not None
    assert sharded.devices == 16
    assert sharded.fsdp * sharded.tensor > 1


def test_the_best_plan_is_no_slower_than_others():
    model, machine = get_config("llama3.1-8b"), MACHINES["mi355x"]
    best = scaling_model.best_plan(model, "full_hadamard", machine, 64, 128)
    assert best is not None
    time = scaling_model.seconds(scaling_model.step_parts(model, "full_hadamard", machine, best))
    other = Plan(1, 16, 4, 128, 1, remat=True)
    assert time < scaling_model.seconds(scaling_model.step_parts(model, "full_hadamard", machine, other))


def measured(devices, mesh, seconds, **changes):
    job = {"program": "benchmarks.train_ours", "subject": "bf16", "model": "llama3.2-1b", "devices": devices}
    job |= {"batch": 4 * devices, "seq": 4096, "mesh": mesh, "remat": "none", "trace": None}
    return {"name": "bf16", "job": job, "times": [seconds] * 3} | changes


def test_measured_points_are_compared(tmp_path, capsys):
    one = {"runs": [measured(1, None, 0.4), measured(1, None, 0.6), measured(1, None, 9.0, absent="wrong")]}
    four = {"runs": [measured(4, "fsdp=2,tensor=2", 0.5), measured(4, "fsdp=4", 0.625)]}
    paths = [tmp_path / "one.json", tmp_path / "four.json"]
    for path, result in zip(paths, (one, four), strict=True):
        path.write_text(json.dumps(result))
    scaling.main(["--check", *map(str, paths)])
    first, mixed, sharded = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert first["measured"] == 0.5  # of both rounds
    model, alone = get_config("llama3.2-1b"), Plan(1, 1, 1, 4, 4, 4096, False)
    told = scaling_model.describe(model, "bf16", MACHINES["h200"], alone)
    assert first["computed"] == told["step_seconds"]
    assert (first["scaling_measured"], sharded["scaling_measured"]) == (1, pytest.approx(0.8))
    assert mixed["scaling_measured"] == pytest.approx(1)
    assert sharded["no_overlap"] > sharded["computed"]


def test_results_without_times_are_refused(tmp_path, capsys):
    path = tmp_path / "none.json"
    path.write_text(json.dumps({"runs": []}))
    with pytest.raises(SystemExit):
        scaling.main(["--check", str(path)])
    assert "no run of ours with times" in capsys.readouterr().err


def test_the_document_holds_the_tables():
    named = scaling.tables(scaling.survey(MACHINES["mi355x"]))
    documented = {name: named[name] for name in scaling.DOCUMENTED}
    assert re.findall(r"<!-- end (.*?) -->", DOCUMENT) == list(documented)
    assert markdown.insert(DOCUMENT, documented) == DOCUMENT
