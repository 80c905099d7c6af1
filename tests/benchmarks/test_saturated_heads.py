"""benchmarks/saturated_heads.py on the CPU."""

import json

import jax
import numpy as np
import pytest

from benchmarks import saturated_heads
from models import llama
from models.configs import get_config

TINY = ["--model", "tiny", "--batch", "2", "--seq", "32", "--before", "1", "--steps", "2"]


@pytest.mark.slow
def test_saturated_heads_lose_rows(capsys):
    saturated_heads.main([*TINY, "--factors", "1", "1024", "--commit", "none"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["lost"][0] == 0
    assert found["lost"][1] > 0
    assert [len(times) for times in found["seconds"]] == [2, 2]


def test_values_stay():
    """In each key/value head's columns: its queries, its key, its value."""
    model = get_config("tiny")
    params = llama.init(model, jax.random.key(0))
    changed = saturated_heads.saturated(params, model, 8)
    before, after = (p["blocks"]["attention"]["qkv"] for p in (params, changed))
    ratio = np.asarray(after / before).reshape(model.n_layers, model.d_model, model.n_kv_heads, -1)
    np.testing.assert_array_equal(ratio[..., -model.head_dim :], 1)
    np.testing.assert_array_equal(ratio[..., : -model.head_dim], 8)


def test_bad_input():
    with pytest.raises(SystemExit):
        saturated_heads.main([*TINY[:-1], "0"])
