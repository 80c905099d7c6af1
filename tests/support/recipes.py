"""Arrays that recipes' own code gave, which tests/golden has, and recipes without their random bits."""

import dataclasses
import functools
import pathlib

import jax.numpy as jnp
import numpy as np

from mxjax.policy import map_operands


@functools.cache
def golden(name):
    """Returns the arrays of tests/golden/NAME.npz."""
    with np.load(pathlib.Path(__file__).parents[1] / "golden" / f"{name}.npz") as file:
        return {key: jnp.asarray(file[key]) for key in file if key != "versions"}


def nearest(policy):
    """Returns the policy with every operand rounded to nearest."""
    return map_operands(policy, lambda operand: dataclasses.replace(operand, rounding="nearest"))


def with_signs(gemm, signs):
    """Returns the GEMM with these signs in its rotation."""
    rotation = dataclasses.replace(gemm.rotation, signs="fixed", values=tuple(map(int, signs)))
    return dataclasses.replace(gemm, rotation=rotation)
