"""Blocks that are unrolled on a mesh, where barriers order the backward pass."""

import os

import pytest
from support.programs import on_devices


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("fsdp=2", "bf16"), ("data=2,fsdp=1,tensor=1", "wgrad_sr", "tied")])
def test_gradients_are_those_of_the_loop(arguments):
    """The order changes no gradient, and is there: a tie each for `gate_up`, `qkv` above, and the head."""
    # On some processors XLA fuses products by YNNPACK, in a loop otherwise than unrolled.
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_experimental_ynn_fusion_type="
    [found] = on_devices(2, "support.unrolled", *arguments, XLA_FLAGS=flags)
    assert found["loss"] < 1e-6
    assert max(found["gradients"]) < 1e-5
    _, ordered, free = found["barriers"]
    blocks = 3
    assert ordered - free == blocks + (blocks - 1) + 1
