"""The embedding's gradient on GPUs has the same bits in any order and on any mesh; float64 is the oracle."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.llamas import SMALL, layer_policies
from support.marks import parametrize
from support.programs import on_devices

from models import decoder, embedding

ROWS, WIDTH = 512, 32


add_rows = jax.jit(embedding.add_rows, static_argnums=2)


def draw(n, spread, most=None):
    """Returns tokens of which few are frequent, as in text, and rows of magnitudes 2^-spread to 1."""
    rng = np.random.default_rng(n)
    tokens = np.minimum(rng.zipf(1.2, n), ROWS) - 1
    tokens[: most or 0] = 7
    rows = rng.standard_normal((n, WIDTH)) * np.exp2(rng.integers(-spread, 1, (n, 1)))
    return tokens.astype(np.int32), rows.astype(jnp.bfloat16).astype(np.float32)


@pytest.mark.parametrize(
    ("n", "spread", "most"), [(1, 0, None), (200, 8, 50), (4096, 0, None), (4096, 24, 3000)]
)
@pytest.mark.parametrize("scale", [1.0, 2.0**-125, 2.0**-100, 2.0**120])
def test_sums_are_those_of_float64_in_any_order(n, spread, most, scale):
    tokens, dy = draw(n, spread, most)
    dy *= np.float32(scale)
    found = np.asarray(add_rows(tokens, dy, ROWS))
    exact = np.zeros((ROWS, WIDTH))
    np.add.at(exact, tokens, dy.astype(np.float64))
    counts = np.bincount(tokens, minlength=ROWS)[:, None].astype(np.float64)
    bound = counts**3 * 2.0**-58 * np.abs(dy).max() + counts * 2.0**-126
    assert np.all(np.abs(found - exact) <= bound + 2.0**-23 * np.abs(exact))
    order = np.random.default_rng(1).permutation(n)
    np.testing.assert_array_equal(add_rows(tokens[order], dy[order], ROWS), found)


def test_a_frequent_token_costs_the_others_no_accuracy():
    tokens = np.array([0] * 70_000 + [1], np.int32)
    dy = np.full((70_001, 1), 1.9990234375, np.float32)
    dy[-1] = 1e-9
    np.testing.assert_allclose(add_rows(tokens, dy, 2), [[70_000 * 1.9990234375], [1e-9]], rtol=1e-6)


@pytest.mark.parametrize("rows", [ROWS, 64])
def test_tokens_out_of_range_count_as_in_a_lookup(rows):
    tokens, dy = draw(64, 0)
    tokens %= rows
    tokens[:9] = [rows, rows + 3, rows - 1, -1, -2, -rows, -rows - 1, 2**31 - 1, 0]
    _, gradient = jax.vjp(lambda table: table[tokens], np.zeros((rows, WIDTH), np.float32))
    np.testing.assert_allclose(add_rows(tokens, dy, rows), gradient(dy)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_is_not_hidden(value):
    for n in (64, 4096):
        tokens, dy = draw(n, 0)
        dy[3, 5] = value
        assert np.all(np.isnan(np.asarray(add_rows(tokens, dy, ROWS))[np.unique(tokens)]))


def test_zeros_and_no_tokens_give_zeros():
    tokens, dy = draw(64, 0)
    assert not np.any(add_rows(tokens, 0 * dy, ROWS))
    assert not np.any(add_rows(tokens[:0], dy[:0], ROWS))


@parametrize("tied", slow=[True], exhaustive=[False])
def test_a_model_on_a_gpu_has_the_gradients_of_one_on_a_cpu(monkeypatch, tied):
    config = dataclasses.replace(SMALL, tied=tied)
    params = decoder.init(config, jax.random.key(0))
    batch = jax.random.randint(jax.random.key(1), (2, 17), 0, config.vocab_size)

    policies = layer_policies(config, "bf16")

    def gradients():
        return jax.jit(jax.grad(lambda p: decoder.mean_loss(config, p, batch, policies=policies)))(params)

    expected = gradients()
    monkeypatch.setattr(embedding, "on_gpu", lambda: True)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), gradients(), expected)


SHARDED = """
import re
import jax, jax.numpy as jnp, numpy as np
from models import embedding, decoder
from training.sharding import make_mesh

embedding.on_gpu = lambda: True
rng = np.random.default_rng(0)
tokens = (np.minimum(rng.zipf(1.2, (8, 64)), 128) - 1).astype(np.int32)
dy = rng.standard_normal((8, 64, 32)).astype(np.float32)


def gradient(table, tokens, dy):
    _, back = jax.vjp(lambda table: decoder._embed(table, tokens, jnp.float32), table)
    return back(dy)[0]


meshes = (4, 1, 1, 1), (2, 2, 1, 1), (1, 4, 1, 1), (1, 2, 1, 2), (1, 2, 2, 1)
for rows, some in ((128, meshes[:3]), (4096, meshes[2:])):
    table = np.zeros((rows, 32), np.float32)
    whole = np.asarray(jax.jit(gradient)(table, tokens, dy))
    for sizes in some:
        with jax.set_mesh(make_mesh("data={},fsdp={},context={},tensor={}".format(*sizes))):
            run = jax.jit(gradient).lower(table, tokens, dy).compile()
            assert np.array_equal(run(table, tokens, dy), whole), (rows, sizes)
        added = re.findall(r"f32[^ ]* all-reduce", run.as_text())
        assert not [a for a in added if "4096" in a], (rows, sizes, added)
print(jax.device_count())
"""


@pytest.mark.slow
def test_a_mesh_gives_the_bits_of_one_device():
    assert on_devices(4, SHARDED, JAX_DISABLE_MOST_OPTIMIZATIONS="0") == [4]
