"""Kernels on meshes, in a process of its own, since the number of devices is fixed when JAX starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_quantizer_runs_where_its_tensor_lies_and_draws_bits_by_global_position():
    flags = {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
    flags["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # LLVM's, which take longer than what is computed
    program = Path(__file__).with_name("partitioned.py")
    result = subprocess.run(
        [sys.executable, program],
        env=os.environ | flags | {"TRITON_INTERPRET": "1"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
