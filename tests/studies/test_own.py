"""A study of one's own: what a file may hold, and the table of its runs."""

import dataclasses
import json
import math
import pathlib
import re
import typing

import numpy as np
import pytest
from support.study_runs import power_law, record

import mxjax
from studies.ladder import __main__ as program
from studies.ladder import own
from studies.ladder.cells import PROTOCOLS, Bits, Protocol, own_parts, policy_of, protocol_of, recipe_of
from studies.ladder.train import run_path
from studies.ladder.whole_runs import is_whole_run
from training.data.indexed_dataset import IndexedWriter

CELLS = [
    "wgrad.even",
    "own.json",
    "recipes.py:mine",
    {"name": "healed", "policy": "own.json; fp8 from 0.82", "layers": ["head=own.json", "blocks[0].*=bf16"]},
]
OWN = {"name": "a", "policy": "own.json"}
SHAPE = {"d_model": 8, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "head_dim": 4, "d_ff": 8}


@pytest.fixture
def write(tmp_path):
    (tmp_path / "own.json").write_text(mxjax.policy_to_json(mxjax.get_policy("wgrad_rht")))
    (tmp_path / "recipes.py").write_text("mine = 'wgrad_sr'")
    (tmp_path / "shape.json").write_text(json.dumps({"vocab_size": 64} | SHAPE))

    def write(**fields):
        path = tmp_path / "my-study.json"
        path.write_text(json.dumps({"cells": CELLS} | fields))
        return path

    return write


def test_a_file_gives_fp8_its_lengths_and_the_recipes(write):
    cells = own.read_study(write(protocol={"like": "tiny", "steps": 60}))
    names = ["fp8.own", "wgrad.even", "own.own", "mine.own", "healed.own", *["fp8.own"] * 4]
    ends = ["my-study"] * 5 + [f"my-study-x{m:g}" for m in own.LENGTHS]
    assert [c.name for c in cells] == [f"{n}.60m.{end}" for n, end in zip(names, ends, strict=True)]
    assert [protocol_of(cell).steps for cell in cells] == [60] * 5 + [39, 48, 54, 66]
    assert protocol_of(cells[0]) == dataclasses.replace(PROTOCOLS["tiny"], steps=60)
    found = [str(policy_of(cells[i])) for i in (2, 3)]
    assert found == [str(mxjax.get_policy(name)) for name in ("wgrad_rht", "wgrad_sr")]
    assert [is_whole_run(cell) for cell in cells[:5]] == [False] * 4 + [True]
    folder = write().parent
    assert recipe_of(cells[4]).layers == (f"head={folder}/own.json", "blocks[0].*=bf16")
    assert recipe_of(cells[4]).policy == f"{folder}/own.json; fp8 from 0.82"
    constant = own.read_study(write(protocol="constant-60m", cells=["wgrad.floor"]))
    assert [cell.name for cell in constant] == ["fp8.own.60m.constant-60m", "wgrad.floor.60m.constant-60m"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"cell": []}, "a study has no field cell; its fields are cells, lengths, model, protocol"),
        ({"cells": []}, '"cells" is a list'),
        ({"cells": ["wgrda"]}, "did you mean 'wgrad'"),
        ({"cells": ["wgrad.flor"]}, "unknown policy 'wgrad.flor'"),
        ({"cells": ["none.json"]}, "none.json: No such file"),
        ({"cells": ["own.json"] * 2}, "two cells are called own.own.60m.tuned-60m: give one another name"),
        ({"cells": [{"name": "wgrad", "policy": "own.json"}]}, "'wgrad' cannot name a recipe of your own"),
        ({"cells": [OWN | {"layers": ["head"]}]}, "--layers takes PATTERN=POLICY"),
        ({"cells": [OWN | {"layers": ["head=fp8_delayed"]}]}, "head has scaling='delayed', and only "),
        ({"cells": ["fp8_delayed"], "model": "moe-100m"}, "mlp.gate_up has scaling='delayed', and only "),
        ({"cells": [OWN | {"deoscillate": "3"}]}, "--deoscillate takes RATIO:PERIOD:START"),
        ({"cells": ["heal"], "protocol": "constant-60m"}, "by train.py itself: its cosine ends with the run"),
        ({"model": "61m"}, "unknown model '61m'"),
        ({"protocol": "tuned"}, "unknown protocol 'tuned'; the protocols are decay, "),
        ({"protocol": {"steps": "40"}}, "protocol: steps cannot be '40'; its type is <class 'int'>"),
        ({"protocol": {"optimizer": "adam"}}, "protocol: optimizer cannot be 'adam'"),
        ({"protocol": {"lr": True}}, "protocol: lr cannot be True"),
        ({"protocol": {"steps": 10}}, "20 evaluations and a warm-up of 150 steps do not fit in 10 steps"),
        *(
            ({"lengths": lengths}, '"lengths" is a list of positive numbers other than 1')
            for lengths in ([1], [math.inf], [1e-320], [2**4000], [1e30], [0.5, 0.5], [True])
        ),
        ({"cells": [OWN | {"name": "a" * 300}]}, "take at most 99 letters"),
        ({"lengths": {}}, "lengths of a study must be a list, got {}"),
        ({"model": []}, "model of a study must be a text, got []"),
        ({"protocol": {"like": []}}, "like of a protocol must be a text, got []"),
        ({"cells": [OWN | {"deoscillate": 5}]}, "deoscillate of a cell must be a text, got 5"),
        ({"cells": [OWN | {"deoscillate": "1:99999999999:1"}]}, "--deoscillate takes RATIO:PERIOD:START"),
        ({"cells": [OWN | {"policy": "wgrad; fp8 from inf"}]}, "--policy 'wgrad; fp8 from inf'"),
        ({"cells": [OWN | {"policy": "wgrad; fp8 from 1099511627776"}]}, "--policy 'wgrad; fp8 from"),
        ({"cells": [OWN | {"layers": ["blocks[12].*=fp8"]}]}, "blocks[12]"),
    ],
)
def test_a_wrong_file_is_one_line(write, tmp_path, fields, said):
    path = write(**fields)
    with pytest.raises(SystemExit) as ended:
        program.run(str(path), out=tmp_path / "runs")
    assert f"error: {path}: " in str(ended.value.code)
    assert said in str(ended.value.code)
    assert "\n" not in str(ended.value.code)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "seeds"), [("8-15", range(8, 16)), ("0-0", range(1)), ("3", range(3)), (None, range(4))]
)
def test_seeds_are_a_number_or_named(write, text, seeds):
    path = write()
    shape = path.with_name("shape.json")
    for cell in program._cells_of(str(path), text, shape):
        assert cell.seed_numbers == seeds
        assert (cell.model, cell.model_config) == ("shape", shape)
    ladder = program._cells_of("ladder-60m", text, None)
    assert ladder[0].seed_numbers == {"8-15": range(8, 16), None: range(8)}.get(text, seeds)


def test_a_study_without_data_leaves_no_folder(write, tmp_path):
    with pytest.raises(SystemExit, match=r"none\.idx: no such file"):
        program.run(str(write()), out=tmp_path / "runs", data=str(tmp_path / "none"))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("text", ["15-8", "-3", "a", "1-", "0", "8 - 9", "999999999", "0-99999"])
def test_other_seeds_are_refused(text):
    with pytest.raises(ValueError, match="--seeds takes their number, as 8, or the first and the last"):
        program._cells_of("ladder-60m", text, None)


def test_the_table_pairs_runs_by_seed_and_counts_tokens(write, tmp_path):
    """Losses follow a power law of the tokens, and seeds differ; own.json needs a tenth more."""
    cells = own.read_study(write(cells=["own.json"]))
    for cell in cells:
        share = protocol_of(cell).steps / 700 / (1.1 if cell.policy == "own" else 1)
        for seed in cell.seed_numbers:
            loss = power_law(share) + 0.1 * seed
            run = record(cell.name, cell.policy, seed, loss, steps=protocol_of(cell).steps)
            run["protocol"] |= {"name": cell.protocol}
            run_path(tmp_path, cell, seed).write_text(
                json.dumps(run | {"resolved_policy": str(policy_of(cell))})
            )
    own.check_same(cells, tmp_path)
    *_, row = own.summary(cells, tmp_path).splitlines()
    label, runs, diverged, loss, gap, _, tokens = (part.strip() for part in row.strip("|").split("|"))
    assert (label, runs, diverged) == ("own", "4", "0")
    assert float(loss) == pytest.approx(power_law(1 / 1.1) + 0.15, abs=1e-4)
    assert float(gap) == pytest.approx(power_law(1 / 1.1) - power_law(1), abs=1e-4)
    assert float(tokens.partition(" %")[0]) == pytest.approx(10, abs=0.5)
    other = dataclasses.replace(cells[1], recipe=cells[1].recipe._replace(policy="wgrad"))
    said = r"own.own.60m.tuned-60m.s0.json was trained with another policy: name"
    with pytest.raises(ValueError, match=said):
        own.check_same([other], tmp_path)


def test_runs_of_another_recipe_or_model_of_the_same_name_are_told(write, tmp_path):
    path, out = write(cells=[CELLS[-1]]), tmp_path / "runs"
    out.mkdir()

    def cell():
        return program._cells_of(str(path), "0-0", tmp_path / "shape.json")[1]

    run = record(cell().name, "healed", 0, 3.0)
    run["protocol"] = {"name": "tuned-60m", **dataclasses.asdict(protocol_of(cell()))}
    run |= {"resolved_policy": "of a schedule"} | json.loads(json.dumps(own_parts(cell())))
    run_path(out, cell(), 0).write_text(json.dumps(run))
    own.check_same([cell()], out)
    (tmp_path / "shape.json").write_text(json.dumps({"vocab_size": 64} | SHAPE | {"d_ff": 16}))
    with pytest.raises(ValueError, match="was trained with another shape: name"):
        own.check_same([cell()], out)
    write(cells=[CELLS[-1] | {"layers": ["head=fp8"]}])
    with pytest.raises(ValueError, match="was trained with another recipe, shape: name"):
        own.check_same([cell()], out)


@pytest.mark.slow
def test_a_study_of_a_file_is_trained_and_printed_by_one_command(write, tmp_path, capsys):
    generator = np.random.default_rng(0)
    for name, size in (("train", 900), ("validation", 200)):
        with IndexedWriter(tmp_path / name, np.dtype(np.uint16)) as writer:
            writer.add(generator.integers(0, 64, size).astype(np.uint16))
    small = {"like": "tiny", "steps": 4, "warmup": 1, "batch": 4, "seq": 16, "evaluations": 2}
    path = write(cells=["own.json"], protocol=small, lengths=[])
    data = {"data": str(tmp_path / "train"), "eval_data": str(tmp_path / "validation"), "vocab_size": 64}
    options = {"out": tmp_path / "runs", "seeds": "8-9", "model_config": tmp_path / "shape.json", **data}
    program.run(str(path), **options)
    shown = capsys.readouterr().out
    runs = {run.name for run in (tmp_path / "runs").glob("*.json")}
    assert runs == {f"{name}.own.shape.my-study.s{s}.json" for name in ("fp8", "own") for s in (8, 9)}
    found = sorted(line.split("|")[1:3] for line in shown.splitlines()[-2:])
    assert found == [[f" {name} ", " 2 "] for name in ("fp8", "own")]
    program.run(str(path), **options)
    assert "0 of 4 runs left" in capsys.readouterr().out


def test_the_page_names_every_field_of_a_protocol_and_every_value_of_its_bits():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "study.md").read_text()
    passage = page.partition("A protocol is a name")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", passage))
    fields = {field.name for field in dataclasses.fields(Protocol)}
    assert fields | set(typing.get_args(Bits)) <= named
