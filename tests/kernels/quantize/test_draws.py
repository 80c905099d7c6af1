"""The kernel that draws a policy's words beside `jax.random`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax.kernels.quantize.draws import draw, draw_by_definition, sign_words
from mxjax.kernels.quantize.quantizer import scalars_of
from mxjax.products.draws import draw_words, uses_of_policy
from mxjax.products.implementations import form_of, implementations_of
from mxjax.runtime.devices import Target, use_target
from mxjax.runtime.keys import fold, fold_each

pytestmark = pytest.mark.usefixtures("kernels_run")
KEY = jax.random.fold_in(jax.random.key(3), 2**31)


@pytest.mark.parametrize("signs", [(1, 16, 64), (128, 1, 2)])
def test_words(signs):
    """Also under vmap, where `jax.random` draws them."""
    words = draw(jax.random.key_data(KEY), signs)
    np.testing.assert_array_equal(words, draw_by_definition(jax.random.key_data(KEY), signs))
    for i, n in enumerate(signs):
        drawn = sign_words(mxjax.random_signs(fold(KEY, i, 2), n))
        for k in range(2):
            wanted = jax.random.bits(fold(KEY, i, k), (2,), jnp.uint32)
            np.testing.assert_array_equal(words[i, k], jnp.append(wanted, drawn))
    keys = jax.random.split(KEY, 2)
    many = jax.vmap(lambda key: draw(jax.random.key_data(key), signs))(keys)
    np.testing.assert_array_equal(many[1], draw(jax.random.key_data(keys[1]), signs))


def on_hopper(monkeypatch):
    """Draws as on a GPU, by a kernel in the interpreter."""
    monkeypatch.setattr("mxjax.products.draws.current_target", lambda: Target("cuda", "sm_90"))


@pytest.mark.parametrize("policy", ["amazon", "wgrad_rht", "nvfp4"])
def test_uses_have_the_words_of_their_keys_and_signs(policy, monkeypatch):
    """If a kernel quantizes them, and their GEMM draws anything."""
    on_hopper(monkeypatch)
    policy = mxjax.get_policy(policy)
    with use_target(Target("cuda", "sm_90")):
        implementations = implementations_of(policy, None)
    uses = uses_of_policy(policy, implementations, KEY)
    for name, gemm, pair in zip(implementations, policy.gemms.values(), uses, strict=True):
        for side in pair:
            assert (side.words is not None) == (gemm.needs_key and form_of(name) in ("packed", "bf16"))
            if side.words is not None:
                np.testing.assert_array_equal(side.words[:2], side.key.words[0])
            if side.words is not None and side.signs is not None:
                np.testing.assert_array_equal(scalars_of(side)[2:], sign_words(side.signs))


def test_no_words_where_jax_draws_others(monkeypatch):
    on_hopper(monkeypatch)
    gemms = mxjax.get_policy("amazon").gemms.values()
    assert draw_words(gemms, KEY) is not None
    assert draw_words(gemms, None) is None
    assert draw_words(gemms, jax.random.key(0, impl="rbg")) is None
    with jax.enable_x64(True):
        assert draw_words(gemms, KEY) is None
    with jax.threefry_partitionable(False):
        assert draw_words(gemms, KEY) is None


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_fold_each(impl):
    keys = jax.random.key(4, impl=impl)[None]
    folded = fold_each(fold_each(keys, 2, 4), 0, 3)
    for i in range(2):
        for k in range(3):
            wanted = jax.random.fold_in(jax.random.fold_in(keys[0], 2 + i), k)
            assert (jax.random.key_data(folded[0, i, k]) == jax.random.key_data(wanted)).all()
