"""The state of a small run."""

import jax
import jax.numpy as jnp
import optax
import pytest

from training.step import init_state


@pytest.fixture
def state():
    params = {"w": jax.random.normal(jax.random.key(0), (3, 4)), "norm": {"scale": jnp.ones(4)}}
    return init_state(params, optax.adamw(1e-3))
