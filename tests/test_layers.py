"""The table of layers and their policies."""

import pytest

import mxjax
from mxjax.layers import resolve

NAMES = [f"blocks.{i}.{layer}" for i in range(4) for layer in ("up", "down")] + ["head"]


def test_the_last_matching_rule_wins():
    policies = resolve(NAMES, "wgrad", [("blocks.*", "fp8"), ("blocks.[01].up", "bf16")])
    assert policies["blocks.0.up"] == mxjax.get_policy("bf16")
    assert policies["blocks.0.down"] == mxjax.get_policy("fp8")
    assert policies["head"] == mxjax.get_policy("wgrad")


def test_a_rule_takes_a_policy_as_well_as_a_name():
    policy = mxjax.with_scale_rule(mxjax.get_policy("wgrad"), "even")
    assert resolve(NAMES, "bf16", [("head", policy)])["head"] == policy


def test_a_pattern_that_matches_nothing_is_an_error():
    with pytest.raises(ValueError, match=r"'block\.\*' matches none of blocks\.\*\.up, "):
        resolve(NAMES, "wgrad", [("block.*", "bf16")])


def test_resolved_policies_are_hashable_and_equal_by_value():
    assert hash(resolve(NAMES, "wgrad")) == hash(resolve(NAMES, mxjax.get_policy("wgrad")))
    assert resolve(NAMES, "wgrad") != resolve(NAMES, "wgrad", [("head", "bf16")])


def test_the_listing_names_every_layer_once():
    text = str(resolve(NAMES, "wgrad", [("blocks.2.up", "bf16"), ("head", "bf16")]))
    assert "blocks.0-1,3.up, blocks.0-3.down: fprop mxfp4" in text
    assert "blocks.2.up, head: fprop bf16" in text


def test_a_scale_rule_reaches_every_layer_in_mxfp4():
    table = resolve(NAMES, "bf16", [("head", "wgrad")]).with_scale_rule("even")
    assert table["head"] == mxjax.with_scale_rule(mxjax.get_policy("wgrad"), "even")
    assert table["blocks.0.up"] == mxjax.get_policy("bf16")
    with pytest.raises(ValueError, match="no operand of any layer is in mxfp4"):
        resolve(NAMES, "bf16").with_scale_rule("even")
