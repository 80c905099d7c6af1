"""Arrays that recipes' own code gave, which tests/golden has."""

import functools
import pathlib

import jax.numpy as jnp
import numpy as np


@functools.cache
def golden(name):
    """Returns the arrays of tests/golden/NAME.npz."""
    with np.load(pathlib.Path(__file__).parents[1] / "golden" / f"{name}.npz") as file:
        return {key: jnp.asarray(file[key]) for key in file if key != "versions"}
