"""Kernels on meshes, in a process of its own, since the number of devices is fixed when JAX starts."""

import pytest
from support.programs import run_compiled


@pytest.mark.slow
def test_the_quantizer_runs_where_its_tensor_lies_and_draws_bits_by_global_position():
    flags = {"JAX_NUM_CPU_DEVICES": "8", "TRITON_INTERPRET": "1"}
    flags["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # LLVM's, which take longer than what is computed
    assert run_compiled("partitioned", **flags) == "all equal\n"
