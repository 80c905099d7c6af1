"""The table of layers and their policies."""

import re

import pytest

import mxjax
from mxjax.policy.layers import matching, resolve
from mxjax.recipes import get_policy

NAMES = [f"blocks.{i}.{layer}" for i in range(4) for layer in ("up", "down")] + ["head"]


def test_the_last_matching_rule_wins():
    policies = resolve(
        NAMES, get_policy("wgrad"), [("blocks.*", get_policy("fp8")), ("blocks.[01].up", get_policy("bf16"))]
    )
    assert policies["blocks.0.up"] == get_policy("bf16")
    assert policies["blocks.0.down"] == get_policy("fp8")
    assert policies["head"] == get_policy("wgrad")


@pytest.mark.parametrize(
    "index", ["0", "1", "3", "-1", "-4", ":2", "2:", "-1:", "-2:", ":-1", "1:3", "-3:-1", ":", ":4", "-4:"]
)
def test_brackets_take_numbered_layers_as_lists_do(index):
    found = matching(NAMES, f"blocks[{index}].*")
    chosen = eval(f"[0, 1, 2, 3][{index}]")
    expected = [f"blocks.{i}." for i in (chosen if isinstance(chosen, list) else [chosen])]
    assert sorted({name.removesuffix("up").removesuffix("down") for name in found}) == expected
    assert len(found) == 2 * len(expected)


@pytest.mark.parametrize("pattern", ["blocks[:9].*", "blocks[-5:].*", "blocks[1:5].up"])
def test_a_slice_beyond_the_layers_is_of_a_deeper_model(pattern):
    with pytest.raises(ValueError, match="of blocks there are 4"):
        matching(NAMES, pattern)


def test_brackets_count_blocks_by_number_not_by_letter():
    names = [f"blocks.{i}.up" for i in range(12)]
    assert matching(names, "blocks[-2:].up") == ["blocks.10.up", "blocks.11.up"]
    assert matching(names, "blocks[2].*") == ["blocks.2.up"]


@pytest.mark.parametrize(
    ("patterns", "ending"),
    [
        ("block.* blocks[].* blocks[a:].* blocks[1-2].* layers[0].*", ""),
        ("blocks[4].* blocks[-5].* blocks[2:2].* blocks[:2].left", ".*of blocks there are 4"),
        ("blocks[:2]", r".*for all within it write 'blocks\[:2\]\.\*'$"),
        ("blocks.0", r".*for all within it write 'blocks\.0\.\*'$"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error(patterns, ending):
    for pattern in patterns.split():
        said = rf"'{re.escape(pattern)}' matches none of 'blocks\.\*\.up', {ending}"
        with pytest.raises(ValueError, match=said):
            resolve(NAMES, get_policy("wgrad"), [(pattern, get_policy("bf16"))])


def test_resolved_policies_are_hashable_and_equal_by_value():
    assert hash(resolve(NAMES, get_policy("wgrad"))) == hash(resolve(NAMES, get_policy("wgrad")))
    other = resolve(NAMES, get_policy("wgrad"), [("head", get_policy("bf16"))])
    assert resolve(NAMES, get_policy("wgrad")) != other


def test_the_listing_names_every_layer_once():
    rules = [(name, get_policy("bf16")) for name in ("blocks.2.up", "head")]
    text = str(resolve(NAMES, get_policy("wgrad"), rules))
    assert "blocks.0-1,3.up, blocks.0-3.down: fprop mxfp4" in text
    assert "blocks.2.up, head: fprop bf16" in text


def test_a_scale_rule_reaches_every_layer_in_mxfp4():
    table = resolve(NAMES, get_policy("bf16"), [("head", get_policy("wgrad"))]).with_scale_rule("even")
    assert table["head"] == mxjax.with_scale_rule(get_policy("wgrad"), "even")
    assert table["blocks.0.up"] == get_policy("bf16")
    with pytest.raises(ValueError, match="no operand of any layer is in mxfp4"):
        resolve(NAMES, get_policy("bf16")).with_scale_rule("even")
