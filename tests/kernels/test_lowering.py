"""The jitted functions lower for CUDA on a machine without a GPU, in a process without the interpreter."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.programs import run_compiled

from mxjax.kernels import lowering

SCRIPT = """
import jax
import jax.numpy as jnp
import mxjax
from mxjax.kernels.matmul.fp4_gemm import matmul
from mxjax.runtime.devices import Target, use_target
from mxjax.operands.use import OperandUse
from mxjax.kernels import lowering
from mxjax.kernels.call_message import MachineCode
from mxjax.kernels.quantize.quantizer import quantize_operands
from mxjax.numerics.operand import Operand
from mxjax.policy import Rotation

SR = OperandUse(-2, Operand(rounding="stochastic"), Rotation(16, "redrawn"))


def quantize(x, key, signs):
    return quantize_operands(x, [OperandUse(-1), SR._replace(key=key, signs=signs)])


def forward(x, w, key, signs):
    lhs, rhs = quantize(x, key, signs)[0], quantize(w, key, signs)[1]
    return matmul(lhs.elements, lhs.scales, rhs.elements, rhs.scales)


def custom_calls(f, *arguments):
    text = jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    return text.count("triton_kernel_call")


# Calls are counted, for which kernels need not be compiled.
lowering.compile_kernel = lambda *_: MachineCode(b"\\x7fELF", "kernel", 4, 0, 0, 1, 90)
x = w = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
key, signs = jax.eval_shape(lambda: jax.random.key(0)), jax.ShapeDtypeStruct((16,), jnp.float32)
batch = jax.ShapeDtypeStruct((3, *x.shape), x.dtype)
keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3))
with use_target(Target("cuda", "sm_90")):
    print(
        custom_calls(quantize, x, key, signs),
        custom_calls(forward, x, w, key, signs),
        custom_calls(jax.vmap(quantize, (0, 0, None)), batch, keys, signs),
    )
    lowering.compile_kernel = lambda *_: MachineCode(b"\\x7fELF", "kernel", 4, 0, 256, 128, 90)
    experts, sizes = jax.ShapeDtypeStruct((3, *w.shape), w.dtype), jax.ShapeDtypeStruct((3,), jnp.int32)
    product = jax.jit(lambda x, w, sizes: mxjax.ragged_dot(x, w, sizes, policy="bf16"))
    text = product.trace(x, experts, sizes).lower(lowering_platforms=("cuda",)).as_text()
    print(text.count("triton_kernel_call"), text.count("-> (tensor<512x512xbf16>, tensor<3584xui8>)"))
"""


pytestmark = pytest.mark.slow


def test_two_threads_that_lower_a_kernel_compile_it_once(monkeypatch):
    class Pool:
        def submit(self, function, *job):
            time.sleep(0.1)
            return object()

    monkeypatch.setattr(lowering, "_pool", Pool)
    job = (object(), ("float32",), "cuda", "sm_90", (), ())
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: lowering.start_compiling(*job), range(2))
    assert first is second


def test_lowers_for_cuda_without_a_gpu():
    """Experts' product, by kernels too, has scratch memory for each of its 14 programs as another result."""
    assert run_compiled(SCRIPT, PYTHONWARNINGS="error").split() == ["1", "3", "1", "1", "1"]


DOT = r"""
import collections
import dataclasses
import functools
import json
import re
import sys
import zlib
import jax
import jax.numpy as jnp
import mxjax
from mxjax.runtime.devices import Target, use_target
from mxjax.kernels import lowering


# Kernels that are traced and never lowered, as of the products without gradients, need not be compiled.
lowering.start_traced = lambda: None
# Wgrad alone in MXFP4: both of its operands are tensors that another GEMM reads in FP8.
ONLY_WGRAD = dataclasses.replace(mxjax.get_policy("fp8"), wgrad=mxjax.Gemm())


def all_three(policy, implementation, x, w, dy, key):
    policy = ONLY_WGRAD if policy == "only_wgrad" else policy
    dot = functools.partial(mxjax.dot, policy=policy, key=key, implementation=implementation)
    y, vjp = jax.vjp(dot, x, w)
    return y, vjp(dy)


def unescape(escaped):
    return escaped if escaped == b"\\" else bytes.fromhex(escaped.decode())


def kernel_of(call):
    # MLIR escapes the bytes of a compressed message with the kernel's name and machine code.
    [text] = re.findall(r'opaque = "(.*?)"', call)
    data = re.sub(rb"\\(\\|[0-9A-F]{2})", lambda m: unescape(m[1]), text.encode())
    names = rb"(quantize_pairs|quantize|cast|gemm|carry_both|sift|correct|draw)_kernel"
    return re.search(names, zlib.decompress(data))[0].decode()


def lower(arch, policy, implementation):
    with use_target(Target("cuda", arch)):
        traced = jax.jit(functools.partial(all_three, policy, implementation)).trace(
            # Of one size, so that products of one kind share a kernel; the builds have others.
            jax.ShapeDtypeStruct((2, 64, 128), jnp.bfloat16),
            jax.ShapeDtypeStruct((128, 128), jnp.float32),
            jax.ShapeDtypeStruct((2, 64, 128), jnp.float32),
            jax.eval_shape(lambda: jax.random.key(0)),
        )
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "custom_call @triton_kernel_call" in line]
    products = re.findall(r"dot_general .*?: \(tensor<[^>]*x(\w+)>, tensor<[^>]*x(\w+)>\)", text)
    return {
        "kernels": collections.Counter(map(kernel_of, calls)),
        "products": sorted(set(" ".join(pair) for pair in products)),
        "choices": text.count("stablehlo.case") + text.count("stablehlo.if"),
        "scaled_dots": text.count('stablehlo.composite "xla.scaled_dot"'),
    }


wanted = json.loads(sys.argv[1])
print(json.dumps([lower(*arguments) for arguments in wanted]))
"""
FP8 = {
    # Fprop, Dgrad (the gradient on the left, its rows sifted), Wgrad (on the right); none falls back to XLA.
    "kernels": {"quantize_kernel": 3, "carry_both_kernel": 3, "sift_kernel": 1, "correct_kernel": 3},
    "products": ["f8E4M3FN f8E4M3FN", "f8E4M3FN f8E5M2", "f8E5M2 f8E4M3FN"],
    "choices": 0,
    "scaled_dots": 0,
}
TRITON = {
    "kernels": {"quantize_kernel": 3, "gemm_kernel": 3},
    "products": [],
    "choices": 0,
    "scaled_dots": 0,
}
# The products in XLA's own decomposition of a scaled dot.
SCALED_DOT = {
    "kernels": {"quantize_kernel": 3},
    "products": ["bf16 bf16"],
    "choices": 0,
    "scaled_dots": 3,
}
# The values are too large to keep: x and w are quantized once more for the backward pass.
XLA = {"kernels": {"quantize_kernel": 5}, "products": ["bf16 bf16"], "choices": 0, "scaled_dots": 0}


# Rungs between FP8 and MXFP4: the kernel quantizes every MXFP4 operand, whatever else reads its tensor.
MIXED = {
    policy: {
        "kernels": {"quantize_kernel": operands},
        "products": ["bf16 bf16"],
        "choices": 0,
        "scaled_dots": 0,
    }
    for policy, operands in {"fprop": 2, "fprop_dgrad": 4, "only_wgrad": 2}.items()
}
ONLY_WGRAD_FP8 = {
    "kernels": {
        "cast_kernel": 3,
        "quantize_kernel": 1,
        "quantize_pairs_kernel": 1,
        "carry_both_kernel": 1,
        "correct_kernel": 1,
    },
    "products": FP8["products"],
    "choices": 0,
    "scaled_dots": 0,
}


def on_hopper(expected):
    """Returns the kernels on Hopper, where x, bfloat16 and at most rotated along columns, has its own."""
    return expected | {"kernels": expected["kernels"] | {"quantize_kernel": 2, "quantize_pairs_kernel": 1}}


def with_draws(expected, passes=2):
    """Adds a draw for each pass that quantizes what is rounded stochastically."""
    return expected | {"kernels": expected["kernels"] | {"draw_kernel": passes}}


EXPECTED = [
    ("sm_90", "fp8_carriers", on_hopper(FP8)),
    ("sm_90", "triton", on_hopper(TRITON)),
    ("sm_90", "scaled_dot", on_hopper(SCALED_DOT)),
    ("sm_90", None, on_hopper(FP8)),
    ("sm_100", "triton", TRITON),
    ("sm_100", None, TRITON),
]


# One policy by every implementation on every target, and other policies on each target.
CASES = [(arch, "wgrad_hadamard", name, expected) for arch, name, expected in EXPECTED]
CASES += [("sm_90", "wgrad_sr", None, with_draws(on_hopper(FP8)))]
CASES += [("sm_90", "wgrad_sr", "xla", with_draws(XLA, 1))]
CASES += [("sm_90", policy, "xla", expected) for policy, expected in MIXED.items()]
CASES += [("sm_90", "only_wgrad", None, ONLY_WGRAD_FP8)]
MORE = [("sm_90", "full_hadamard", "fp8_carriers", FP8), ("sm_90", "full_hadamard", "xla", XLA)]
MORE += [("sm_90", "wgrad_hadamard", "xla", XLA), ("sm_100", "wgrad_sr", "triton", with_draws(TRITON))]
MORE += [("sm_89", "wgrad_sr", "fp8_carriers", with_draws(FP8))]
MORE += [("sm_90", "full_hadamard", "scaled_dot", SCALED_DOT), ("sm_100", "full_hadamard", None, TRITON)]


@pytest.mark.parametrize(
    "cases", [CASES, pytest.param(MORE, marks=pytest.mark.exhaustive)], ids=["wgrad", "full"]
)
def test_dot_and_its_gradients_lower_to_the_kernels(cases):
    """Lowers all cases in one process, which keeps what it compiles."""
    wanted = [case[:3] for case in cases]
    lowered = dict(zip(wanted, json.loads(run_compiled(DOT, json.dumps(wanted))), strict=True))
    assert lowered == {case[:3]: case[3] for case in cases}
