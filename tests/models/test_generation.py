"""Generation against transformers' `generate` (golden file), and with a cache against without."""

import dataclasses
import functools
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.llamas import GOLDEN, NAMES, SMALL, layer_policies
from support.marks import parametrize

from models import decoder
from models.attention.documents import Documents
from models.generation import Options, cache_bytes, choose, empty_cache, generate, is_in_nucleus, read
from models.huggingface.config import read_config
from models.huggingface.files import Reader
from models.huggingface.weights import read_params

GENERATED = np.load(pathlib.Path(__file__).parents[1] / "golden" / "generation.npz")
KEY = jax.random.key(0)


def exact(config):
    """The precision in which transformers computed: float32 everywhere."""
    return Options(layer_policies(config, "fp32", [("*", "fp32")]), "xla", jnp.float32)


def greedy(config, params, prompt, count):
    drawn = generate(config, exact(config), params, prompt, count, KEY, temperature=0)
    return np.stack(list(drawn), axis=1)


@pytest.mark.parametrize(
    "name", [n if n == "llama3.1" else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
)
def test_greedy_tokens_equal_transformers(name):
    config = read_config(json.loads((GOLDEN / name / "config.json").read_text()))
    with Reader(GOLDEN / name) as reader:
        params = read_params(reader, config)[0]
    prompt, expected = (GENERATED[f"{name}/{part}"] for part in ("prompt", "tokens"))
    found = greedy(config, params, jnp.asarray(prompt, jnp.int32), expected.shape[1])
    np.testing.assert_array_equal(found, expected)


WINDOWS = dataclasses.replace(SMALL, n_layers=3, windows=(4, 4, 0), sinks=True)
EXACT = [("*", "fp32")]
QUANTIZED = [("blocks.1.*", "fp32"), ("blocks.0.attention.scores", "wgrad"), ("head", "fp32")]


@parametrize(
    ("config", "rules", "documents"),
    (WINDOWS, EXACT, None),
    slow=[(WINDOWS, EXACT, Documents(7)), (SMALL, QUANTIZED, Documents(7, restart_positions=True))],
    exhaustive=[(SMALL, QUANTIZED, None), (SMALL, QUANTIZED, Documents(7))],
)
def test_a_cache_changes_no_logits(config, rules, documents):
    """Up to the order of sums, after prompts and later chunks, also beyond a window.

    MXFP4's blocks lie along d_in, so each token is quantized alone.
    """
    options = Options(layer_policies(config, "wgrad", rules), "xla", jnp.float32, documents)
    params = decoder.init(dataclasses.replace(config, init_std=0.2), KEY)
    tokens = jax.random.randint(KEY, (2, 17), 0, config.vocab_size).at[0, 2:14:5].set(7).at[1, 4].set(7)
    more = {"policies": options.policies, "implementation": "xla", "dtype": jnp.float32}
    more["documents"] = documents
    expected = jax.jit(functools.partial(decoder.apply, config, **more))(params, tokens)
    cache = empty_cache(config, 2, 20, jnp.float32)
    for start, stop in itertools.pairwise([0, 6, 7, 8, 9, 10, 11, 17]):
        logits, cache = read(config, options, params, tokens[:, start:stop], cache, start)
        np.testing.assert_allclose(logits, expected[:, stop - 1], rtol=1e-4, atol=1e-4)


def test_blocks_with_a_window_keep_a_window_s_worth():
    cache = empty_cache(WINDOWS, 2, 20, jnp.float32)
    assert [k.shape[:3] for k, _ in cache.blocks] == [(2, 2, 4), (1, 2, 20)]
    assert cache_bytes(WINDOWS, 20) == 4 * (4 + 4 + 20) * 2 * 16


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_nucleus_is_transformers_s(p):
    logits = jnp.asarray(GENERATED["top_p/logits"])
    np.testing.assert_array_equal(is_in_nucleus(logits, p), GENERATED[f"top_p/{p}"])


def test_tokens_are_drawn_by_their_probabilities():
    logits = jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05]))
    draws = choose(jnp.broadcast_to(logits, (20_000, 4)), KEY, 1.0, 0.9)
    shares = np.bincount(draws, minlength=4) / len(draws)
    np.testing.assert_allclose(shares, np.array([0.5, 0.3, 0.15, 0]) / 0.95, atol=0.02)
    cooler = choose(jnp.broadcast_to(logits, (20_000, 4)), KEY, 0.5, 1.0)
    expected = np.array([0.5, 0.3, 0.15, 0.05]) ** 2
    np.testing.assert_allclose(np.bincount(cooler) / len(cooler), expected / expected.sum(), atol=0.02)
    assert int(choose(logits, KEY, 0.0, 0.5)) == 0
