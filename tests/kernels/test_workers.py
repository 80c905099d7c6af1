"""Helper processes compile the kernels that this process would, and it does so itself if they are gone."""

import json

import pytest
from support.programs import run_compiled

pytestmark = pytest.mark.slow

LOWER = """
import hashlib, json, sys
import jax
import jax.numpy as jnp
from triton.compiler import ASTSource
from mxjax.devices import Target, use_target
from mxjax.kernels import workers
from mxjax.kernels.matmul.carry import carry_operand

workers.FEWEST_CORES, workers.FEWEST_KERNELS = 1, 2
here, make_ir = [], ASTSource.make_ir
ASTSource.make_ir = lambda self, *rest: here.append(self.fn.__name__) or make_ir(self, *rest)
target = Target("cuda", "sm_90")

def carry(elements, scales):
    return [carry_operand(elements, scales, carrier, target) for carrier in ("e4m3", "e5m2")]

with use_target(target):
    arrays = jax.ShapeDtypeStruct((1, 64, 32), jnp.uint8), jax.ShapeDtypeStruct((1, 64, 2), jnp.uint8)
    traced = jax.jit(carry).trace(*arrays)
    if int(sys.argv[1]):
        workers._helper()._process.kill()
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
print(json.dumps({"here": here, "program": hashlib.sha256(text.encode()).hexdigest()}))
"""


def test_helpers_compile_the_same_kernels(tmp_path):
    def lower(name, kills):
        return json.loads(run_compiled(LOWER, kills, TRITON_CACHE_DIR=str(tmp_path / name)))

    killed = lower("killed", 1)
    assert killed["here"] == ["carry_kernel"] * 2
    assert lower("helped", 0) == {"here": [], "program": killed["program"]}
