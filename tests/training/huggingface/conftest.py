"""Runs to export."""

import shutil

import jax
import numpy as np
import pytest
from support.exports import CONFIG, WEIGHT_ONLY, set_policy
from support.llamas import rewrite_params

from models import decoder
from training.huggingface.importing import import_checkpoint


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(np.asarray, decoder.init(CONFIG, jax.random.key(1)))


@pytest.fixture(scope="module")
def run(params, tmp_path_factory):
    """A run with random weights, whose policy is `weight_only` except in the last block."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "seed").mkdir()
    rewrite_params(folder / "seed", CONFIG, params)
    import_checkpoint(folder / "seed", folder / "run")
    shutil.rmtree(folder / "run" / "huggingface")  # as if it had been trained here
    set_policy(folder / "run", WEIGHT_ONLY)
    return folder / "run"
