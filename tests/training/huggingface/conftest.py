"""Runs to export."""

import shutil

import jax
import numpy as np
import pytest
from support.exports import CONFIG, WEIGHT_ONLY, set_policy
from support.llamas import imported

from models import decoder


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(np.asarray, decoder.init(CONFIG, jax.random.key(1)))


@pytest.fixture(scope="module")
def run(params, tmp_path_factory):
    """A run with random weights, whose policy is `weight_only` except in the last block."""
    folder = tmp_path_factory.mktemp("runs")
    run = imported(folder, CONFIG, params)
    shutil.rmtree(run / "huggingface")  # as if it had been trained here
    set_policy(run, WEIGHT_ONLY)
    return run
