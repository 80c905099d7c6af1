"""Policies as JSON text, and changes by path."""

import contextlib
import dataclasses
import json
import re

import numpy as np
import pytest
from support import oracles

import mxjax
from mxjax import Gemm, Operand, Policy, Rotation, policy_from_json, policy_to_json, set_fields


@pytest.mark.parametrize("name", mxjax.policies())
def test_a_policy_survives_a_round_trip(name):
    policy = mxjax.get_policy(name)
    assert policy_from_json(policy_to_json(policy)) == policy
    assert policy_from_json(json.loads(policy_to_json(policy, indent=1))) == policy


def test_the_text_names_every_field():
    data = json.loads(policy_to_json(Policy()))
    for gemm in data.values():
        assert gemm.keys() == {"lhs", "rhs", "rotation"}
        assert all(
            gemm[side].keys() == {f.name for f in dataclasses.fields(Operand)} for side in ("lhs", "rhs")
        )


def test_fields_left_out_have_their_defaults():
    expected = Policy(wgrad=Gemm(rhs=Operand(block_shape=(32, 32)), rotation=Rotation(32)))
    text = '{"wgrad": {"rhs": {"block_shape": [32, 32]}, "rotation": {"size": 32}}}'
    assert policy_from_json(text) == policy_from_json("\ufeff" + text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "a policy must be JSON"),
        ("[" * 100_000, "a policy must be JSON"),
        ('{"wgrad": {"lhs": {"eden": 16, "eden": 32}}}', "a policy must be JSON, each field once"),
        ("[]", "policy must be an object with fields among fprop, dgrad, wgrad"),
        ('{"wgard": {}}', "policy has no field 'wgard'; did you mean 'wgrad'?"),
        ('{"wgrad": null}', "wgrad must be an object"),
        ('{"wgrad": {"lhs": {"scale_rul": "even"}}}', "wgrad.lhs has no field 'scale_rul'; did you mean 'sc"),
        ('{"wgrad": {"lhs": {"format": "mxpf4"}}}', "wgrad.lhs: unknown format 'mxpf4'"),
        ('{"wgrad": {"lhs": {"format": 4}}}', "wgrad.lhs.format must be a string, got 4"),
        ('{"wgrad": {"lhs": {"prescale": "3/4"}}}', "wgrad.lhs.prescale must be a number or null"),
        ('{"wgrad": {"lhs": {"prescale": true}}}', "wgrad.lhs.prescale must be a number or null"),
        ('{"wgrad": {"lhs": {"scale_max": "256"}}}', "wgrad.lhs.scale_max must be a number or null"),
        ('{"wgrad": {"lhs": {"four_over_six": true}}}', "wgrad.lhs.four_over_six must be a string or null"),
        ('{"wgrad": {"lhs": {"eden": 16.0}}}', "wgrad.lhs.eden must be an integer or null"),
        ('{"wgrad": {"rotation": {"values": [1, 0.5]}}}', "wgrad.rotation.values must be a list of integers"),
        ('{"wgrad": {"rotation": {"values": [1, -1]}}}', "wgrad.rotation: Rotation needs values to be"),
        ('{"wgrad": {"lhs": {"block_shape": [32]}}}', "wgrad.lhs.block_shape must be an integer, a pair"),
        ('{"wgrad": {"lhs": {"block_shape": 65537}}}', "wgrad.lhs: block_shape may hold at most 65,536"),
        ('{"wgrad": {"lhs": {"block_shape": [257, 256]}}}', "wgrad.lhs: block_shape may hold at most 65,536"),
        ('{"wgrad": {"rotation": {"seed": 4294967296}}}', "wgrad.rotation: Rotation needs seed to be from 0"),
        ('{"wgrad": {"lhs": {"format": "nvfp4", "eden": 65552}}}', "wgrad.lhs: eden must be an integer of"),
        ('{"wgrad": {"rotation": {"seed": -1}}}', "wgrad.rotation: Rotation needs seed to be from 0"),
        ('{"wgrad": {"rotation": {"size": 16.0}}}', "wgrad.rotation.size must be an integer"),
        ('{"wgrad": {"rotation": "H16"}}', "wgrad.rotation must be an object"),
        ('{"wgrad": {"rhs": {"source": "dequantized"}}}', "policy: wgrad.rhs is dy"),
    ],
)
def test_what_cannot_be_is_refused_by_its_path(text, message):
    with oracles.types_unchecked(), pytest.raises(ValueError, match="^" + re.escape(message)):
        policy_from_json(text)


def test_fields_are_set_by_path():
    policy = set_fields(
        mxjax.get_policy("wgrad"),
        ["wgrad.*.scale_rule=even", "wgrad.rhs.rounding=stochastic", "*.rhs.block_shape=[32, 32]"],
    )
    tile = Operand(block_shape=(32, 32))
    wgrad = Gemm(
        Operand(scale_rule="even"), Operand(scale_rule="even", rounding="stochastic", block_shape=(32, 32))
    )
    assert policy == Policy(Gemm(rhs=tile), Gemm(rhs=tile), wgrad)


def test_rotations_are_set_and_removed():
    policy = set_fields(mxjax.get_policy("wgrad_hadamard"), ["wgrad.rotation=none", "fprop.rotation.size=32"])
    assert policy == Policy(fprop=Gemm(rotation=Rotation(32)))
    assert set_fields(Policy(), ['*.rotation={"signs": "redrawn"}']) == mxjax.get_policy("full_rht")


def test_fields_of_a_rotation_need_one_or_its_size():
    seeded = set_fields(
        Policy(), ["wgrad.rotation.seed=3", "wgrad.rotation.size=16", "*.rotation.signs=fixed"]
    )
    assert seeded == Policy(wgrad=Gemm(rotation=Rotation(16, "fixed", seed=3)))
    assert set_fields(seeded, ["wgrad.rotation.seed=4", "wgrad.rotation=none"]) == Policy()
    given = set_fields(Policy(), ["wgrad.rotation={}", "wgrad.rotation.signs=redrawn"])
    assert given.wgrad.rotation == Rotation(16, "redrawn")


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("bf16", "wgrad.*.scale_rule=even", "scale_rule is for formats with E8M0 scales"),
        ("nvfp4", "*.*.scale_rule=even", "scale_rule is for formats with E8M0 scales"),
        ("wgrad", "wgrad.rhs.quantile=0.9", "quantile is for split=outliers and split=clip"),
        ("wgrad", "wgrad.rotation.seed=3", "there is no rotation; set wgrad.rotation.size too"),
        ("wgrad", "*.rotation.signs=redrawn", "there is no rotation; set *.rotation.size too"),
        ("wgrad_hadamard", "wgrad.rotation.seed=3", "seed is for signs=fixed without values"),
        ("nvfp4_te", "wgrad.rotation.seed=3", "seed is for signs=fixed without values"),
        ("fp32", "wgrad.lhs.source=dequantized", "the Fprop reads that tensor in float32"),
        ("fp32", "dgrad.rhs.source=dequantized", "the Fprop reads that tensor in float32"),
    ],
)
def test_a_change_without_an_effect_is_refused(name, change, reason):
    with pytest.raises(ValueError, match=re.escape(f"{change!r} has no effect: {reason}")):
        set_fields(mxjax.get_policy(name), ["wgrad.rhs.rounding=nearest", change])


def test_a_change_needs_an_effect_on_one_operand_only():
    fprop = set_fields(mxjax.get_policy("fprop"), ["*.*.scale_rule=even"])
    assert fprop.fprop == Gemm(Operand(scale_rule="even"), Operand(scale_rule="even"))
    reset = ["fprop.*.format=nvfp4", "fprop.*.gradient=straight_through", "fprop.*.scale_rule=floor"]
    assert set_fields(mxjax.get_policy("quartet"), reset).fprop.lhs == Operand("nvfp4")
    split = set_fields(Policy(), ["*.lhs.quantile=0.9", "fprop.lhs.split=outliers"])
    assert split.fprop.lhs == Operand(split="outliers", quantile=0.9)


def test_a_field_that_nothing_reads_may_stay_when_the_format_changes():
    """Records of runs hold such fields: a change of all operands, and a schedule's, need not fit each."""
    changed = set_fields(mxjax.get_policy("fprop"), ["*.*.scale_rule=even"])
    assert changed.wgrad.lhs == dataclasses.replace(Operand("fp8_e4m3"), scale_rule="even")
    assert policy_from_json(policy_to_json(changed)) == changed
    assert str(changed.wgrad) == str(mxjax.get_policy("fprop").wgrad)
    assert dataclasses.replace(Operand(scale_rule="even"), format="bf16").scale_rule == "even"


def test_a_source_needs_an_fprop_that_rounds_or_rotates():
    assert not any(policy.idle_sources for policy in mxjax.policies().values())
    for other in ("fprop.lhs.format=mxfp4", "fprop.lhs.format=bf16", "fprop.rotation.size=16"):
        changes = ["wgrad.lhs.source=dequantized", other]
        assert set_fields(mxjax.get_policy("fp32"), changes).wgrad.lhs.source == "dequantized"


def test_only_the_result_of_all_changes_must_be_a_policy():
    wanted = dataclasses.replace(Policy(), wgrad=Gemm(lhs=Operand(source="dequantized"), rotation=Rotation()))
    start = Policy(*[Gemm(rotation=Rotation())] * 3)
    changes = ["wgrad.lhs.source=dequantized", "fprop.rotation=none", "dgrad.rotation=none"]
    assert set_fields(start, changes) == wanted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("wgrad.rhs.rounding", "write PATH=VALUE"),
        ("wgard.rhs.rounding=nearest", "unknown GEMM 'wgard'; use one of fprop, dgrad, wgrad, or * for all"),
        ("wgrad.dy.rounding=nearest", "unknown operand 'dy'; use one of lhs, rhs, or * for all"),
        ("wgrad.rhs.roundin=nearest", "did you mean 'rounding'?"),
        ('wgrad.rotation={"size": 16, "size": 32}', "wgrad.rotation must be an object"),
        ("wgrad.rhs=mxfp4", "a path is GEMM.OPERAND.FIELD"),
        ("wgrad=mxfp4", "a path is GEMM.OPERAND.FIELD"),
        ("wgrad.rhs.rounding=stochasticly", "wgrad.rhs: unknown rounding 'stochasticly'"),
        ("wgrad.rotation.sign=redrawn", "did you mean 'signs'?"),
        ("wgrad.lhs.block_shape=" + "[" * 100_000, "block_shape"),
    ],
)
def test_a_change_that_cannot_be_is_refused(change, message):
    with oracles.types_unchecked(), pytest.raises(ValueError, match=re.escape(message)):
        set_fields(Policy(), [change])


@pytest.mark.parametrize(
    ("call", "correct"),
    [
        (lambda: policy_to_json("wgrad"), "mxjax.get_policy('wgrad')"),
        (lambda: set_fields("wgrad", ["wgrad.rotation.size=16"]), "mxjax.get_policy('wgrad')"),
        (lambda: mxjax.with_scale_rule("wgrad", "even"), "mxjax.get_policy('wgrad')"),
        (lambda: set_fields(Policy(), "wgrad.rotation.size=16"), "['wgrad.rotation.size=16']"),
    ],
)
def test_an_argument_of_another_type_is_refused_with_what_to_write(call, correct):
    with oracles.types_unchecked(), pytest.raises(TypeError, match=re.escape(f"write {correct}")):
        call()


def test_numbers_may_be_numpys():
    with oracles.types_unchecked():
        operand = Operand("nvfp4", scale_target=np.float32(5.5), eden=np.int32(128))
        square = Operand(block_shape=(np.int64(32), 32))
        policy = Policy(Gemm(operand, square, rotation=Rotation(np.int64(16), seed=np.uint8(3))))
    assert policy_from_json(policy_to_json(policy)) == policy
    assert set_fields(policy, ["fprop.lhs.eden=16"]).fprop.lhs.scale_target == 5.5


ODD = (True, False, 1, 16.0, 0.75, 2**70, "16", b"16", None, (), (16,), (True, 32), (8.0, 32), [1, 32], 1j)
PARTS = (Operand(), Operand("nvfp4"), Rotation())
FIELDS = [(part, field.name) for part in PARTS for field in dataclasses.fields(part)]


@pytest.mark.parametrize(("part", "field"), FIELDS, ids=str)
def test_what_constructs_comes_back_from_json(part, field):
    """A bool is no number and 16.0 no integer, in JSON; so neither is it in a constructor."""
    made = []
    for value in ODD:
        with oracles.types_unchecked(), contextlib.suppress(TypeError, ValueError):
            made.append(dataclasses.replace(part, **{field: value}))
    for one in made:
        policy = Policy(dgrad=Gemm(one) if isinstance(one, Operand) else Gemm(rotation=one))
        with oracles.types_unchecked():
            assert policy_from_json(policy_to_json(policy)) == policy
