"""Policies from files and objects, and their record in config.json."""

import dataclasses
import functools
import json
import pathlib
import re
import sys

import pytest
from support import oracles

import mxjax
from models import decoder
from models.configs import get_config
from mxjax import Gemm, Operand, Policy, Rotation
from training import phases
from training.command_line import parse
from training.config import Config, DataConfig, PrecisionConfig, by_flag
from training.flags.policy_source import load_policy
from training.phases import changed_files, files_of, files_on_record, from_record, parse_schedule, phases_of
from training.run.record import from_json, to_json

OWN = Policy(wgrad=Gemm(rotation=Rotation(32, "fixed", seed=3)))
IDLE = Policy(Gemm(Operand("fp32"), Operand()), wgrad=Gemm(Operand(source="dequantized")))
LAYER_POLICIES = functools.partial(decoder.layer_policies, get_config("tiny"))


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Files in the current folder: a policy as JSON and in Python, and wrong ones."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.json").write_text(mxjax.policy_to_json(OWN, indent=2))
    (tmp_path / "bad.json").write_text('{"wgrad": {"lhs": {"format": 5}}}')
    (tmp_path / "own.py").write_text(
        "import mxjax\nown = mxjax.Policy(wgrad=mxjax.Gemm(rotation=mxjax.Rotation(32, 'fixed', seed=3)))\n"
        "named = 'fp8'\n"
    )
    (tmp_path / "idle.json").write_text(mxjax.policy_to_json(IDLE))
    (tmp_path / "idle.py").write_text(f"from mxjax import *\nown = {IDLE!r}")


def test_a_policy_is_read_from_json_and_python(files):
    assert load_policy("own.json") == load_policy("own.py:own") == OWN
    assert load_policy("own.py:named") == load_policy("fp8") == mxjax.get_policy("fp8")
    first, second, third = parse_schedule("own.json; ./own.py:own from 4; fp8 from 6", 9)
    assert (first.policy, second.policy, third.name) == (OWN, OWN, "fp8")
    assert PrecisionConfig(layers=("head=own.py:own",)).rules() == [("head", OWN)]


def test_a_program_below_main_is_not_run(tmp_path):
    (tmp_path / "own.py").write_text("own = 'fp8'\nif __name__ == '__main__':\n    1 / 0")
    assert load_policy(f"{tmp_path}/own.py:own") == mxjax.get_policy("fp8")


@pytest.mark.parametrize("module", ["its_neighbour", "its_package.__init__", "its_namespace.module"])
def test_a_file_imports_its_neighbours(tmp_path, module):
    path, modules = list(sys.path), set(sys.modules)
    for name in ("fp8", "wgrad"):
        file = (tmp_path / name).joinpath(*module.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True)
        file.write_text(f"own = {name!r}")
        (tmp_path / name / "own.py").write_text(f"from {module.removesuffix('.__init__')} import own")
        assert load_policy(f"{tmp_path / name / 'own.py'}:own") == mxjax.get_policy(name)
    assert sys.path == path
    assert not any(name.startswith("its_") for name in sys.modules.keys() - modules)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.json", "missing.json: No such file"),
        ("bad.json", "bad.json: wgrad.lhs.format must be a string"),
        (".json/", "unknown policy"),
        ("own.jsn", "unknown policy 'own.jsn': a file of one is named FILE.json or FILE.py:NAME"),
        ("missing.py:own", "missing.py: No such file"),
        ("own.py", "write own.py:NAME"),
        ("own.py:other", "own.py has no mxjax.Policy called other; it has own"),
        ("idle.json", "idle.json: wgrad.lhs.source=dequantized has no effect: the Fprop reads that tensor"),
        ("idle.py:own", "idle.py:own: wgrad.lhs.source=dequantized has no effect"),
        (IDLE, "wgrad.lhs.source=dequantized has no effect"),
    ],
)
def test_errors_name_the_file_in_one_line(files, source, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse_schedule(source, 9)
    assert "\n" not in str(caught.value)


def test_a_file_that_changed_since_the_run_began_is_noticed(files, tmp_path):
    recorded = json.loads(
        json.dumps(files_of(PrecisionConfig("own.json; fp8 from 3", layers=("*=own.py:own",))))
    )
    assert [pathlib.Path(name).name for name in recorded] == ["own.json", "own.py"]
    assert files_on_record({"policy_files": recorded}) == recorded
    assert changed_files(recorded) == []
    (tmp_path / "own.py").write_text("1 / 0")
    (said,) = changed_files(recorded)
    assert "own.py changed since the run began, which keeps its policies on record" in said
    (tmp_path / "own.py").unlink()
    assert changed_files(recorded) == []
    for wrong in ([], {"a": 1}, {"a": [1, 2]}):
        with pytest.raises(ValueError, match="holds no policy_files of this version"):
            files_on_record({"policy_files": wrong})


@pytest.mark.parametrize("policy", ["own.py:own", "fp8; own.py:own from 3"])
@pytest.mark.parametrize("has_begun", [False, True])
def test_a_file_that_a_received_run_names_is_not_executed(files, tmp_path, policy, has_begun):
    """Without its record of phases, which whoever sends a run may leave out."""
    (tmp_path / "own.py").write_text("open('executed', 'w')\nown = 'fp8'")
    saved = {"data": {}} if has_begun else {}
    said = (
        "holds no policies of this version" if has_begun else r"config.json names .*own.py as a policy, and a"
    )
    for config in (
        Config(policy=policy),
        Config(precision=PrecisionConfig("fp8", layers=(f"head={policy}",))),
    ):
        with pytest.raises(ValueError, match=said):
            phases.phases_of_run(saved, config, LAYER_POLICIES)
    assert not (tmp_path / "executed").exists()


def test_changes_hold_in_every_phase_but_not_in_exceptions():
    changes = ("*.rotation.size=32", "wgrad.*.rounding=stochastic")
    precision = PrecisionConfig("wgrad; wgrad_rht from 3", layers=("head=wgrad",), set=changes)
    for phase, name in zip(phases_of(precision, 4, LAYER_POLICIES), ("wgrad", "wgrad_rht"), strict=True):
        changed = mxjax.set_fields(mxjax.get_policy(name), changes)
        assert phase.layers["blocks.0.mlp.down"] == changed != mxjax.get_policy(name)
        assert phase.layers["head"] == mxjax.get_policy("wgrad")
    with pytest.raises(ValueError, match=r"--set changes bf16: .*rounding='nearest'"):
        parse_schedule("wgrad; bf16 from 3", 4, ["wgrad.lhs.rounding=stochastic"])


def test_a_change_needs_an_effect_in_one_phase_only():
    changes = ["wgrad.*.scale_rule=even", "wgrad.rotation.signs=redrawn"]
    first, second = parse_schedule("wgrad_hadamard; fp8 from 3", 4, changes)
    assert first.policy.wgrad == Gemm(*[Operand(scale_rule="even")] * 2, Rotation(16, "redrawn"))
    assert str(second.policy) == str(mxjax.get_policy("fp8"))
    for change in changes:
        with pytest.raises(ValueError, match=re.escape(f"--set {change!r} has no effect: ")):
            parse_schedule("bf16; fp8 from 3", 4, [change])


def test_a_configuration_takes_a_policy_itself():
    config = Config(policy=OWN, seed=5)
    assert from_json(json.loads(json.dumps(to_json(config)))) == config
    assert by_flag(config)["policy"] == OWN
    assert by_flag(config)["seed"] == 5  # not the rotation's
    assert config.folder().name.startswith("tiny-custom-")
    [phase] = phases_of(config.precision, 300, LAYER_POLICIES)
    assert (phase.policy, phase.layers["blocks.1.mlp.down"]) == ("custom", OWN)


def test_a_configuration_takes_texts_for_paths_and_lists_for_tuples():
    flags = ["--out", "runs/a", "--model-config", "a.json", "--policy", "wgrad"]
    flags += ["--layers", "head=fp8", "--set", "wgrad.rhs.rounding=stochastic", "--data", "a", "b"]
    with oracles.types_unchecked():
        precision = PrecisionConfig("wgrad", layers=["head=fp8"], set=["wgrad.rhs.rounding=stochastic"])
        config = Config(precision=precision, data=DataConfig(["a", "b"]), out="runs/a", model_config="a.json")
        assert config == parse(flags)
        with pytest.raises(TypeError, match=r"layers must be a tuple .*write \('head"):
            PrecisionConfig(layers="head=fp8")


def test_a_policy_of_another_type_is_refused():
    for make in (Config, PrecisionConfig):
        with oracles.types_unchecked(), pytest.raises(TypeError, match="policy must be an mxjax"):
            make(policy=3)
    raw = to_json(Config())
    raw["precision"]["policy"] = 3
    with pytest.raises(ValueError, match="holds no configuration of this version"):
        from_json(raw)


def test_the_record_gives_back_every_layer_s_policy():
    other = dataclasses.replace(OWN, wgrad=Gemm(rotation=Rotation(32, "fixed", seed=4)))
    rules = [("head", other), ("blocks.0.*", Policy(dgrad=Gemm(Operand(prescale=0.7500001))))]
    [phase] = phases_of(PrecisionConfig(OWN), 9, lambda default, _: LAYER_POLICIES(default, rules))
    later = phase._replace(first_step=4, policy="later", layers=phase.layers.with_scale_rule("even"))
    saved = json.loads(json.dumps(phases.to_record([phase, later])))
    assert from_record(saved) == (phase, later)
    assert from_record({}) is None
    with pytest.raises(ValueError, match="holds no policies of this version"):
        from_record(saved | {"policies": {}})
