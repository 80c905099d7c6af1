"""Programs lowered for ROCm compute what the definitions do.

XLA runs them on the CPU and an emulator of gfx950 their kernels, which it launches as the programs say.
"""

import json

import pytest
from support.marks import parametrize
from support.programs import run_compiled

import mxjax

DOTS = """
import functools, json, os, pathlib, sys
import jax, jax.numpy as jnp, numpy as np
import mxjax
from support.programs import dot_and_gradients, dot_arguments
from support.rocm_on_cpu import Emulation

emulation = Emulation(pathlib.Path(os.environ["TRITON_CACHE_DIR"]))
for policy, shape, dtype, *fields in json.loads(sys.argv[1]):
    x, w, dy, key = dot_arguments(tuple(shape[:-1]), shape[-1], dtype)
    x = x.at[(0,) * (x.ndim - 1) + (3,)].set(jnp.inf)
    emulation.calls.clear()
    name, policy = policy, mxjax.set_fields(mxjax.get_policy(policy), fields)
    found = emulation.run(functools.partial(dot_and_gradients, policy), x, w, dy, key)
    # The reference multiplies by 4/3 before the product, and so rounds elsewhere.
    implementation = "xla" if name == "amazon" else "reference"
    define = jax.jit(functools.partial(dot_and_gradients, policy, implementation=implementation))
    for of, y, z in zip(("y", "dx", "dw"), found, define(x, w, dy, key), strict=True):
        assert (y.dtype, y.shape) == (z.dtype, z.shape)
        assert not jnp.isfinite(z).all() or of == "dx"
        np.testing.assert_array_equal(y, z, err_msg=f"{policy}, {of}")
    print(json.dumps([call.name for call in emulation.calls]))
"""
CASES = [("lumen", (45, 96, 50), "bfloat16")]
MORE = [
    ("wgrad_hadamard", (2, 80, 128, 96), "bfloat16"),
    ("full_rht", (3, 2, 11, 70, 33), "bfloat16"),
    ("full_sr", (67, 40, 130), "float32"),
    ("amazon", (2, 21, 64, 50), "bfloat16"),
    ("full_rht", (2, 40, 96, 50), "bfloat16", "*.rotation.size=128"),
    ("tetrajet", (1, 33, 1), "bfloat16"),
]


@parametrize("cases", slow=[CASES], exhaustive=[MORE], ids=["some", "more"])
def test_dots_and_their_gradients_are_those_of_the_definition(cases, tmp_path):
    """Bit for bit, with an infinity in x."""
    said = run_compiled(DOTS, json.dumps(cases), TRITON_CACHE_DIR=str(tmp_path)).splitlines()
    for (policy, *_), line in zip(cases, said, strict=True):
        calls = json.loads(line)
        assert calls.count("gemm_kernel") == (2 if policy == "amazon" else 3)
        drawn = {"draw_kernel"} if mxjax.get_policy(policy).needs_key else set()
        assert set(calls) == {"gemm_kernel", "quantize_kernel"} | drawn


STEP = """
import json, os, pathlib
import jax, jax.numpy as jnp, numpy as np, optax
from models import decoder
from support.llamas import SMALL, layer_policies
from support.rocm_on_cpu import Emulation
from training.step import init_state, make_train_step

policies = layer_policies(SMALL, "wgrad_rht", [("head", "full_hadamard"), ("*.scores", "full_sr")])
state = init_state(decoder.init(SMALL, jax.random.key(0)), optax.adamw(1e-3))
batch = np.random.default_rng(0).integers(0, SMALL.vocab_size, (1, 34), np.int32)

def step(implementation, *arguments):
    def loss(params, batch, key):
        options = {"policies": policies, "key": key, "implementation": implementation}
        return decoder.mean_loss(SMALL, params, batch, **options)

    return make_train_step(loss, optax.adamw(1e-3))(*arguments)

emulation = Emulation(pathlib.Path(os.environ["TRITON_CACHE_DIR"]))
arguments = state, batch, jax.random.key(1)
found = emulation.run(lambda *a: step(None, *a), *arguments)
wanted = jax.jit(lambda *a: step("reference", *a))(*arguments)
assert jax.tree.structure(found) == jax.tree.structure(wanted)
for (path, y), z in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
    # XLA may round the optimizer's arithmetic differently; another quantized value would differ far more.
    np.testing.assert_allclose(y, z, rtol=1e-5, atol=1e-8, err_msg=jax.tree_util.keystr(path))
print(json.dumps([len(emulation.calls), len({call.image for call in emulation.calls})]))
"""


@pytest.mark.exhaustive
def test_a_step_of_a_llama_is_that_of_the_definition(tmp_path):
    """Loss, gradient norm, parameters and moments; attention's scores are in MXFP4 too, layers in a scan."""
    calls, images = json.loads(run_compiled(STEP, TRITON_CACHE_DIR=str(tmp_path)))
    assert calls > 1.5 * images > 36  # the blocks' kernels run twice
