"""Policies are plain data: frozen, hashable, comparable, printable, and checked when they are made."""

import dataclasses
import math
import re

import pytest
from support.oracles import types_unchecked

import mxjax
from mxjax import Gemm, Operand, Policy, Rotation, with_scale_rule

BF16 = Gemm(Operand("bf16"), Operand("bf16"))
DELAYED = mxjax.get_policy("fp8_delayed")
DEQUANTIZED = Operand(source="dequantized")
SEEN = Gemm(DEQUANTIZED), Gemm(rhs=DEQUANTIZED)
STOCHASTIC = Operand(rounding="stochastic")


@pytest.mark.parametrize("value", [Operand(), Rotation(), Gemm(), Policy()], ids=lambda v: type(v).__name__)
def test_every_field_is_frozen(value):
    for field in dataclasses.fields(value):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field.name, getattr(value, field.name))


def test_the_default_is_mxfp4_to_nearest_by_the_floor_rule():
    assert Policy() == mxjax.get_policy("wgrad")
    assert Operand() == Operand("mxfp4", None, "floor", "nearest", None, "original")
    assert Gemm().rotation is None
    assert Rotation() == Rotation(16, "none", 0)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Operand(), "mxfp4:floor"),
        (Operand("mxfp4", (32, 32), "even", "stochastic", 0.75), "mxfp4:32x32:even:sr:*0.75"),
        (Operand(block_shape=16), "mxfp4:1x16:floor"),
        (DEQUANTIZED, "mxfp4:floor:dequantized"),
        (Operand("nvfp4"), "nvfp4"),
        (Operand("fp8_e5m2"), "fp8_e5m2"),
        (Rotation(), "H16"),
        (Rotation(64, "redrawn"), "H64 redrawn signs"),
        (Rotation(32, "fixed"), "H32 fixed signs"),
        (BF16, "bf16 x bf16"),
        (Gemm(rotation=Rotation(32)), "mxfp4:floor x mxfp4:floor (H32)"),
        (
            Policy(BF16, Gemm(), Gemm(rotation=Rotation())),
            "fprop bf16 x bf16 | dgrad mxfp4:floor x mxfp4:floor | wgrad mxfp4:floor x mxfp4:floor (H16)",
        ),
    ],
    ids=str,
)
def test_str_is_compact(value, text):
    assert str(value) == text


def test_str_tells_the_named_policies_apart():
    texts = [str(policy) for policy in mxjax.policies().values()]
    assert len(set(texts)) == len(texts)


def test_repr_gives_the_policy_back():
    policy = mxjax.get_policy("amazon")
    assert eval(repr(policy), vars(mxjax)) == policy


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Operand("mxfp5"), "unknown format 'mxfp5'; did you mean 'mxfp4'.*nvfp4"),
        (lambda: Operand(rounding="up"), "unknown rounding 'up'.*nearest, stochastic"),
        (lambda: Operand(scale_rule="half"), "unknown scale_rule 'half'.*floor, even, uos, rceil, ceil"),
        (lambda: Operand("mxfp8_e4m3", scale_rule="uos"), "'uos' is defined for E2M1"),
        (lambda: Operand("mxfp6_e2m3", scale_rule="quest"), "'quest' is defined for E2M1"),
        (lambda: Operand(gradient="none"), "unknown gradient 'none'.*straight_through, clipped"),
        (lambda: Operand("bf16", gradient="clipped"), "bf16 is not quantized"),
        (lambda: Operand(source="copy"), "unknown source 'copy'.*original, dequantized"),
        (lambda: Operand("bf16", rounding="stochastic"), "bf16 is not quantized"),
        (lambda: Operand("fp32", prescale=0.75), "fp32 is not quantized"),
        (lambda: Rotation(16, "random"), "unknown signs 'random'.*none, fixed, redrawn"),
        *(
            (
                lambda shape=shape: Operand(block_shape=shape),
                f"a positive size or a tuple of two, got {re.escape(str(shape))}",
            )
            for shape in (0, -32, (0, 32), (32, -1), [32, 32])
        ),
        (lambda: Rotation(48), r"size.*\(2, 4, 8, 16, 32, 64, 128, 256\), got 48"),
        (lambda: Rotation(512), "size.*got 512"),
        (lambda: Rotation(1), "size.*got 1"),
        *((lambda gemm=gemm: Policy(fprop=gemm), "the Fprop's operands are 'original'") for gemm in SEEN),
        (lambda: Policy(dgrad=Gemm(DEQUANTIZED)), "dgrad.lhs is dy"),
        (lambda: Policy(wgrad=Gemm(rhs=DEQUANTIZED)), "wgrad.rhs is dy"),
        (lambda: Policy(dgrad=Gemm(Operand(gradient="clipped"))), "gradient= is for the Fprop's operands"),
        (lambda: Policy(dgrad=Gemm(rhs=Operand(split="mean"))), "split= is for x and dy"),
        (lambda: Policy(Gemm(rhs=Operand(split="mean"))), "split= is for x and dy"),
        (lambda: Operand("bf16", split="mean"), "bf16 is not quantized"),
        (lambda: Operand(split="outliers", quantile=1.0), "quantile must be between 0.5 and 1, got 1.0"),
        (lambda: Operand("mxfp4", scaling="delayed"), "for fp8_e4m3 and fp8_e5m2, not mxfp4"),
        (lambda: Operand("fp8_e4m3", scaling="delayed", prescale=0.5), "takes the tensor as it is"),
        (lambda: dataclasses.replace(DELAYED.fprop, rotation=Rotation(16)), "it is; use rotation=None"),
        (
            lambda: mxjax.set_fields(DELAYED, ["wgrad.lhs.format=fp8_e5m2"]),
            "gives x one scale for both of its GEMMs, so it needs one format; got fp8_e4m3 and fp8_e5m2",
        ),
        (lambda: with_scale_rule(mxjax.get_policy("fp8"), "even"), "'even' has no effect"),
        (lambda: with_scale_rule(Policy(), "half"), "unknown scale_rule 'half'"),
    ],
)
def test_what_cannot_be_raises(make, message):
    with types_unchecked(), pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "format", "value"),
    [
        *(("prescale", "mxfp4", value) for value in (0.0, -0.5, 1.0001, math.inf, math.nan, 1e-300, 0.08)),
        ("prescale", "fp8_e4m3", 4e-6),
        *(("scale_target", "nvfp4", value) for value in (1e-300, 0.4, math.nan)),
        *(("scale_max", "nvfp4", value) for value in (1e-300, 2.0**-10, math.inf)),
        ("scale_max", "fp4_ue5m3", 2.0**-18),
    ],
)
def test_a_number_that_makes_everything_0_or_infinite_raises(name, format, value):
    with pytest.raises(ValueError, match=rf"{name} must be from .* to .*, got {value}; use None"):
        Operand(format, **{name: value})


@pytest.mark.parametrize(
    ("gemm", "needs"),
    [
        (Gemm(), False),
        (Gemm(lhs=STOCHASTIC), True),
        (Gemm(rhs=STOCHASTIC), True),
        (Gemm(rotation=Rotation()), False),
        (Gemm(rotation=Rotation(16, "fixed")), False),
        (Gemm(rotation=Rotation(16, "redrawn")), True),
        (BF16, False),
    ],
    ids=str,
)
def test_a_gemm_needs_a_key_where_it_draws_random_bits(gemm, needs):
    assert gemm.needs_key is needs


def test_with_scale_rule_changes_mxfp4_operands_only():
    # Beside MXFP4: E8M0 scales on other elements, and formats that have no rule.
    others = Gemm(Operand("mxfp6_e2m3"), Operand("fp8_e5m2"))
    fours = Gemm(Operand(rounding="stochastic", prescale=0.75), Operand("nvfp4"), Rotation(32))
    policy = with_scale_rule(Policy(BF16, others, fours), "rceil")
    changed = dataclasses.replace(fours, lhs=dataclasses.replace(fours.lhs, scale_rule="rceil"))
    assert policy == Policy(BF16, others, changed)
