"""The kernel that draws a policy's words beside `jax.random`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax.devices import Target
from mxjax.draws import draw_words
from mxjax.gemm_input import fold
from mxjax.kernels.quantize.draws import draw, draw_by_definition, sign_words
from mxjax.matmul import policy_inputs

pytestmark = pytest.mark.usefixtures("kernels_run")
KEY = jax.random.fold_in(jax.random.key(3), 2**31)


@pytest.mark.parametrize("signs", [(1, 16, 64), (64, 1, 2)])
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


def test_inputs_have_the_words_of_their_keys_and_signs(monkeypatch):
    """As on a GPU, whose kernels read the words instead of the keys and signs."""
    policy = mxjax.get_policy("amazon")
    monkeypatch.setattr("mxjax.draws.current_target", lambda: Target("cuda", "sm_90"))
    *gemms, _, _ = policy_inputs(policy, KEY)
    for gemm in gemms:
        for how in gemm:
            wanted = jax.random.bits(how.key, (2,), jnp.uint32) if how.key is not None else how.words[:2]
            np.testing.assert_array_equal(how.words[:2], wanted)
            if how.signs is not None:
                np.testing.assert_array_equal(how.words[2:], sign_words(how.signs))


@pytest.mark.parametrize("key", [None, jax.random.key(0, impl="rbg")])
def test_no_words_where_jax_draws_others(key, monkeypatch):
    monkeypatch.setattr("mxjax.draws.current_target", lambda: Target("cuda", "sm_90"))
    assert draw_words(mxjax.get_policy("amazon"), key) is None
