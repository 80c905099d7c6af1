"""Checkpoints: what is saved comes back bit for bit, old ones go, and what is missing is said."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mxjax.training.checkpoint import Checkpoints
from mxjax.training.step import init_state


@pytest.fixture
def state():
    params = {"w": jax.random.normal(jax.random.key(0), (3, 4)), "norm": {"scale": jnp.ones(4)}}
    return init_state(params, optax.adamw(1e-3))


def at_step(state, step):
    return state._replace(step=jnp.int32(step))


def test_the_state_and_the_position_come_back(tmp_path, state):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(at_step(state, 5), {"next_index": 5})
    with Checkpoints(tmp_path) as checkpoints:
        restored, position = checkpoints.restore(jax.eval_shape(lambda: state))
    assert position == {"next_index": 5}
    jax.tree.map(np.testing.assert_array_equal, restored, at_step(state, 5))


def test_only_the_newest_are_kept(tmp_path, state):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(at_step(state, step), {"next_index": step})
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest == 3
        with pytest.raises(ValueError, match=r"no checkpoint of step 1; there are \[2, 3\]"):
            checkpoints.restore_params(state.params, 1)


def test_parameters_come_back_alone(tmp_path, state):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(at_step(state, 1), {})
    with Checkpoints(tmp_path) as checkpoints:
        params = checkpoints.restore_params(jax.eval_shape(lambda: state.params))
    jax.tree.map(np.testing.assert_array_equal, params, state.params)


def test_nothing_to_restore_is_an_error(tmp_path, state):
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match="no checkpoint in"):
            checkpoints.restore(state)
        with pytest.raises(ValueError, match="there are none"):
            checkpoints.restore_params(state.params)
