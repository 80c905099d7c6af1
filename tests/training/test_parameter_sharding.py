"""The first state of a run, and the logical axes of its parameters."""

import jax
import optax
import pytest

from models import decoder
from models.configs import DecoderConfig
from training import sharding as parameter_sharding
from training.sharding import make_mesh


def test_states_of_two_seeds_are_made_by_one_program(monkeypatch):
    """So that JAX's compilation cache has it for the second."""
    programs, jit = [], jax.jit

    def noting(function, **options):
        def call(*arguments):
            programs.append(jit(function, **options).lower(*arguments).as_text())
            return jit(function, **options)(*arguments)

        return call

    monkeypatch.setattr(jax, "jit", noting)
    mesh = make_mesh()
    optimizer, config = optax.sgd(1.0), DecoderConfig(64, 32, 1, 1, 1, 32, 32)
    first, second = (
        parameter_sharding.first_state(config, optimizer, mesh, jax.random.key(seed))[0] for seed in (0, 1)
    )
    assert len(programs) == 2
    assert programs[0] == programs[1]
    assert (first.params["embedding"] != second.params["embedding"]).all()


def test_every_parameter_has_logical_axes():
    model = DecoderConfig(256, 128, 2, 4, 2, 32, 384)
    params = decoder.abstract_params(model)
    axes = parameter_sharding.parameter_axes(params)
    jax.tree.map(lambda x, a: pytest.fail(f"{a} of {x}") if len(a) != x.ndim else None, params, axes)
    cut = [a for a in jax.tree.leaves(axes, is_leaf=lambda a: isinstance(a, tuple)) if "norm" not in a]
    assert len(cut) == 6
    assert all("embed" in a for a in cut)
