"""The target of kernels, and that JAX keeps apart what it traced for each."""

import jax
import jax.numpy as jnp

from mxjax.runtime.devices import INTERPRETER, Target, current_target, use_target


def test_a_trace_is_of_one_target():
    targets = [Target("cuda", "sm_90"), Target("hip", "gfx950"), INTERPRETER]

    @jax.jit
    def traced():
        return jnp.array([current_target() == target for target in targets])

    here = traced()
    for i, target in enumerate(targets):
        with use_target(target):
            assert traced().tolist() == [i == j for j in range(3)]
    assert (traced() == here).all()
