"""Decoders with MLPs in some blocks and experts in the others, and with blocks that do not rotate."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.llamas import layer_policies

from models import decoder
from models.block import block_numbers
from models.configs import get_config
from models.experts.layer import routing_by_layer
from mxjax import get_policy
from training.optimizer.deoscillation import quantized_weights
from training.sharding import check_shards, parse_mesh
from training.step import layer_names

MIXED = dataclasses.replace(get_config("moe-tiny"), vocab_size=64, dense_d_ff=(64, 0, 0, 64))


def test_sizes_are_those_of_the_parameters():
    params = decoder.abstract_params(MIXED)
    assert MIXED.n_params == sum(leaf.size for leaf in jax.tree.leaves(params))
    experts = [params["blocks"]["mlp"][name].size for name in ("gate_up", "down")]
    assert MIXED.n_expert_params == sum(experts)
    assert MIXED.n_active_params == MIXED.n_params - sum(experts) * 6 // 8


def test_each_block_has_the_layers_and_policies_of_its_kind():
    rules = [("blocks[:1].*", "fp8"), ("blocks.*.mlp.router", "bf16")]
    policies = layer_policies(MIXED, "wgrad", rules)
    assert [i for i in range(4) if f"blocks.{i}.mlp.router" in policies.names] == [1, 2]
    runs = [(start, stop, of_run["mlp.down"]) for start, stop, of_run in decoder.runs(policies, 4)]
    assert runs == [(0, 1, get_policy("fp8")), (1, 3, get_policy("wgrad")), (3, 4, get_policy("wgrad"))]


def test_names_have_the_numbers_of_the_blocks():
    params, numbers = decoder.init(MIXED, jax.random.key(0)), block_numbers(MIXED)
    names = layer_names(params, numbers)
    assert "blocks.3.dense_mlp.down" in names
    found = [name for name in names if name.endswith("router")]
    assert found == ["blocks.1.mlp.router", "blocks.2.mlp.router"]
    policies = layer_policies(MIXED, "bf16")
    batch = jnp.arange(34).reshape(2, 17)
    _, measured = jax.jit(lambda p: decoder.measured_loss(MIXED, p, batch, policies=policies))(params)
    assert measured is not None
    assert measured.routing.load.shape == (2, 8)
    got = list(routing_by_layer(measured.routing, numbers["mlp"]))
    assert got == [f"blocks.{i}.mlp.router" for i in (1, 2)]


@pytest.mark.slow
def test_quantized_weights_are_those_of_the_policies_of_their_blocks():
    params = decoder.init(MIXED, jax.random.key(0))
    policies = layer_policies(MIXED, "bf16", [("blocks[2:].*", "wgrad")])
    quantize = jax.jit(lambda params: quantized_weights(params, policies, block_numbers(MIXED)))
    found = quantize(params)["blocks"]
    for module in ("mlp", "dense_mlp"):
        before, after = params["blocks"][module]["down"], found[module]["down"]
        np.testing.assert_array_equal(after[0], before[0])
        assert np.any(after[1] != before[1])


def test_a_mesh_keeps_the_blocks_of_an_mlp_among_experts_whole():
    config = dataclasses.replace(MIXED, dense_d_ff=(96, 0, 0, 96))
    check_shards(parse_mesh("tensor=2", 2), config, layer_policies(config, "bf16"))
    said = r"split blocks.dense_mlp.down's axis 'mlp' of 96 .* whole runs of 32"
    with pytest.raises(ValueError, match=said):
        check_shards(parse_mesh("tensor=2", 2), config, layer_policies(config, "wgrad"))


def test_a_block_without_rotation_does_not_see_the_order_of_earlier_tokens():
    """The last token's logits stay if the others change places, and not with rotation in one block."""
    config = dataclasses.replace(get_config("tiny"), vocab_size=64, n_layers=1, init_std=0.1)
    params = decoder.init(config, jax.random.key(0))
    tokens = jnp.arange(12)[None]
    swapped = tokens.at[0, :11].set(tokens[0, 10::-1])

    def change(rope_layers):
        one = dataclasses.replace(config, rope_layers=rope_layers)
        policies = layer_policies(one, "fp32", [("*", "fp32")])
        first, second = (
            decoder.apply(one, params, t, policies=policies, dtype=jnp.float32)[0, -1]
            for t in (tokens, swapped)
        )
        return float(jnp.max(jnp.abs(first - second)))

    assert change((0,)) < 1e-5
    assert change(()) > 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dense_d_ff": (64, 0)}, "dense_d_ff must have n_layers 4 entries, got 2"),
        ({"dense_d_ff": (64, 32, 0, 0)}, "dense_d_ff must be 0 in the blocks with experts and one width"),
        ({"dense_d_ff": (64,) * 4}, "there must be both"),
        ({"experts": None}, "there must be both"),
        ({"rope_layers": (1, 2, 0, 0)}, "rope_layers must be 0 or 1"),
        ({"rope_layers": (1,) * 4}, "0 in one at least"),
    ],
)
def test_other_blocks_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MIXED, **change)
