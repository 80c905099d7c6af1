"""Programs lowered for ROCm compute what the definitions do.

XLA runs them on the CPU and an emulator of gfx950 their kernels, which it launches as the programs say.
"""

import concurrent.futures
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


BATCHED = """
import json, os, pathlib
import jax, jax.numpy as jnp, numpy as np
import mxjax
from support.programs import dot_arguments
from support.rocm_on_cpu import Emulation

def batched(implementation, xs, ws, dys):
    def one(x, w, dy):
        dot = lambda x, w: mxjax.dot(x, w, policy="wgrad_hadamard", implementation=implementation)
        y, vjp = jax.vjp(dot, x, w)
        return y, *vjp(dy)

    return jax.vmap(one)(xs, ws, dys)

x, w, dy, _ = dot_arguments((3, 37, 96), 40, jnp.bfloat16)
arrays = x, jnp.stack([w, 2 * w[::-1], w[:, ::-1]]), dy
emulation = Emulation(pathlib.Path(os.environ["TRITON_CACHE_DIR"]))
found = emulation.run(lambda *a: batched(None, *a), *arrays)
wanted = jax.jit(lambda *a: batched("reference", *a))(*arrays)
for name, y, z in zip(("y", "dx", "dw"), found, wanted, strict=True):
    assert (y.dtype, y.shape) == (z.dtype, z.shape)
    np.testing.assert_array_equal(y, z, err_msg=name)
print(json.dumps([call.grid for call in emulation.calls if call.name == "gemm_kernel"]))
"""


@pytest.mark.exhaustive
def test_a_mapped_axis_of_x_and_w_is_an_axis_of_the_grid(tmp_path):
    """`jax.vmap` of a dot and its gradients: three launches multiply all pairs."""
    grids = json.loads(run_compiled(BATCHED, TRITON_CACHE_DIR=str(tmp_path)))
    assert [grid[1] for grid in grids] == [3, 3, 3]


CACHED = """
import hashlib, json, os, pathlib
import jax, jax.numpy as jnp, numpy as np
import mxjax
from support.programs import dot_arguments
from support.rocm_on_cpu import Emulation

def dot(x, w):
    return mxjax.dot(x, w, policy="wgrad_hadamard")

def dot_of_less(x, w):
    return dot(x[3:], w) - 1

events = []
x, w, *_ = dot_arguments((5, 64), 7, jnp.bfloat16)
emulation = Emulation(pathlib.Path(os.environ["TRITON_CACHE_DIR"]))
jax.monitoring.register_event_listener(lambda event, **_: events.append(event.rsplit("/", 1)[-1]))
digests, hits, misses = [], [], []
for function in (dot, dot_of_less, dot):
    events.clear()
    found = emulation.run(function, x, w)
    hits.append(events.count("cache_hits"))
    misses.append(events.count("cache_misses"))
    np.testing.assert_array_equal(found, function(x, w))
    digests.append(hashlib.sha256(np.asarray(found).tobytes()).hexdigest())
print(json.dumps([digests, hits, misses, [call.name for call in emulation.calls]]))
"""


@pytest.mark.exhaustive
def test_programs_from_jaxs_cache_compute_the_same(tmp_path):
    """A process fills the cache; two at once take both of their programs from it, and the first again.

    A program that named a file, which HIP's handler deletes, would miss, or fail in the second process.
    """
    environment = {
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def run(_=None):
        return json.loads(run_compiled(CACHED, **environment))

    wanted, _, misses, calls = run()
    assert min(misses[:2]) > 0
    assert wanted[0] == wanted[2] != wanted[1]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for digests, hits, misses, calls_again in pool.map(run, range(2)):
            assert (digests, calls_again) == (wanted, calls)
            assert min(hits[:2]) > 0
            assert misses == [0, 0, 0]


ATTENTION = """
import json, os, pathlib
import jax, jax.numpy as jnp, numpy as np
from models.attention.causal import causal_attention
from support.rocm_on_cpu import Emulation

rng = np.random.default_rng(0)
shapes = (1, 85, 4, 64), (1, 85, 2, 64), (1, 85, 2, 64), (1, 85, 4, 64)
arrays = [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]

def with_gradients(q, k, v, dy):
    y, vjp = jax.vjp(causal_attention, q, k, v)
    return y, *vjp(dy)

emulation = Emulation(pathlib.Path(os.environ["TRITON_CACHE_DIR"]))
found = emulation.run(with_gradients, *arrays)
wanted = jax.jit(with_gradients)(*(x.astype(jnp.float32) for x in arrays))
for name, y, z in zip(("y", "dq", "dk", "dv"), found, wanted, strict=True):
    assert (y.dtype, y.shape) == (jnp.bfloat16, z.shape)
    assert np.linalg.norm(y.astype(jnp.float32) - z) < 2**-8 * np.linalg.norm(z), name
print(json.dumps([call.name for call in emulation.calls]))
"""


@pytest.mark.exhaustive
def test_attention_and_its_gradients_are_those_of_float32(tmp_path):
    """By three kernels, and XLA between them, within bfloat16's rounding."""
    calls = json.loads(run_compiled(ATTENTION, TRITON_CACHE_DIR=str(tmp_path)))
    assert sorted(calls) == ["forward_kernel", "key_gradients_kernel", "query_gradients_kernel"]


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
