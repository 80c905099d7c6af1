"""The jitted functions lower for CUDA on a machine without a GPU, in a process without the interpreter."""

import importlib.util
import os
import subprocess
import sys

import pytest

SCRIPT = """
import jax
import jax.numpy as jnp
from mxjax.kernels.gemm import matmul
from mxjax.kernels.launch import Target, use_target
from mxjax.kernels.operands import Random, quantize_operands
from mxjax.kernels.sides import Side
from mxjax.policy import Operand, Rotation

SR = Side(Operand(rounding="stochastic"), Rotation(16, "redrawn"))


def quantize(x, key, signs):
    return quantize_operands(x, Side(Operand()), SR, column_random=Random(key, signs))


def forward(x, w, key, signs):
    (lhs, lhs_scales), _ = quantize(x, key, signs)
    _, (rhs, rhs_scales) = quantize(w, key, signs)
    return matmul(lhs, lhs_scales, rhs, rhs_scales)


def custom_calls(f, *arguments):
    text = jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    return text.count("triton_kernel_call")


x = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)
w = jax.ShapeDtypeStruct((512, 384), jnp.float32)
key, signs = jax.ShapeDtypeStruct((2,), jnp.uint32), jax.ShapeDtypeStruct((16,), jnp.float32)
batch = jax.ShapeDtypeStruct((3, *x.shape), x.dtype)
keys = jax.ShapeDtypeStruct((3, 2), jnp.uint32)
with use_target(Target("cuda", "sm_90")):
    print(
        custom_calls(quantize, x, key, signs),
        custom_calls(forward, x, w, key, signs),
        custom_calls(jax.vmap(quantize, (0, 0, None)), batch, keys, signs),
    )
"""


@pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)),
    reason="jaxlib builds Triton's custom calls with jax_cuda13_plugin",
)
@pytest.mark.slow
def test_lowers_for_cuda_without_a_gpu():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "3", "1"]
    assert "Warning" not in done.stderr
