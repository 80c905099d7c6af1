"""The quantizer kernel by the rule `quest` against the definitions in `mxjax`, bit for bit."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from support.quantizer import assert_as_defined, draw_tensor

from mxjax.kernels.quantize import launches, quantizer
from mxjax.numerics.operand import Operand
from mxjax.operands.use import OperandUse
from mxjax.policy import Rotation
from mxjax.runtime.devices import Target

QUEST = Operand(scale_rule="quest")


@pytest.fixture(params=["own", "nvidia"])
def tiles(request, monkeypatch):
    """The target's own tiles, and in the interpreter too those of NVIDIA GPUs, with groups of 32."""
    tile = launches._tile
    if request.param == "nvidia":
        monkeypatch.setattr(launches, "_tile", lambda _, *args: tile(Target("cuda", "sm_90"), *args))
    quantizer._quantizer.cache_clear()
    yield
    quantizer._quantizer.cache_clear()


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("kind", ["normal", "special"])
def test_operands_have_the_definitions_bits(kind):
    x = np.array(draw_tensor(np.random.default_rng(2), (70, 100), kind, "bfloat16"))
    x[:, 32:64] = x[:, 32:33]  # their deviation is zero
    x[40:48] *= 2.0**120  # their sums of squares overflow
    x = jnp.asarray(x)
    drawn = dataclasses.replace(QUEST, rounding="stochastic", prescale=0.75)
    for form in ("packed", "bf16"):
        assert_as_defined(x, OperandUse(-1, QUEST), OperandUse(-2, QUEST), form=form)
        assert_as_defined(x, OperandUse(-1, QUEST, Rotation(32)), form=form)
        assert_as_defined(x, OperandUse(-1, drawn), OperandUse(-2, QUEST, Rotation(16)), form=form)
