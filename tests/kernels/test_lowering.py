"""The jitted functions lower for CUDA on a machine without a GPU, in a process without the interpreter."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.marks import parametrize
from support.programs import run_compiled

from mxjax.kernels import lowering

SCRIPT = """
import jax
import jax.numpy as jnp
import mxjax
from mxjax.kernels import lowering
from mxjax.kernels.call_message import MachineCode
from mxjax.kernels.quantize.quantizer import quantize_operands
from mxjax.operands.use import OperandUse
from mxjax.runtime.devices import Target, use_target


def lower(f, *arguments):
    return jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


# Calls are counted, for which kernels need not be compiled.
lowering.compile_kernel = lambda *_: MachineCode(b"\\x7fELF", "kernel", 4, 0, 256, 128, 90)
x, experts = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((512, 512), (3, 512, 512)))
with use_target(Target("cuda", "sm_90")):
    text = lower(jax.vmap(lambda x: quantize_operands(x, [OperandUse(-1), OperandUse(-2)])), experts)
    print(text.count("triton_kernel_call"))
    sizes = jax.ShapeDtypeStruct((3,), jnp.int32)
    text = lower(lambda x, w, sizes: mxjax.ragged_dot(x, w, sizes, policy="bf16"), x, experts, sizes)
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
    """Mapped tensors are one call. Experts' product has scratch memory for its 14 programs as a result."""
    assert run_compiled(SCRIPT, PYTHONWARNINGS="error").split() == ["1", "1", "1"]


DOT = r"""
import collections, dataclasses, json, re, sys
import mxjax
from mxjax.kernels import lowering
from mxjax.runtime.devices import Target
from support.programs import calls_of, lower_dot, stand_in

# Kernels that are traced and never lowered, as of the products without gradients, need not be compiled.
lowering.start_traced = lambda: None
# Wgrad alone in MXFP4: both of its operands are tensors that another GEMM reads in FP8.
ONLY_WGRAD = dataclasses.replace(mxjax.get_policy("fp8"), wgrad=mxjax.Gemm())


compile_kernel = lowering.compile_kernel


def lower(arch, policy, implementation, compiled):
    lowering.compile_kernel = compile_kernel if compiled else stand_in(90)
    policy = ONLY_WGRAD if policy == "only_wgrad" else policy
    text = lower_dot(Target("cuda", arch), policy, implementation).as_text()
    products = re.findall(r"dot_general .*?: \(tensor<[^>]*x(\w+)>, tensor<[^>]*x(\w+)>\)", text)
    return {
        "kernels": collections.Counter(call.name for call in calls_of(text)),
        "products": sorted(set(" ".join(pair) for pair in products)),
        "choices": text.count("stablehlo.case") + text.count("stablehlo.if"),
        "scaled_dots": text.count('stablehlo.composite "xla.scaled_dot"'),
    }


print(json.dumps([lower(*arguments) for arguments in json.loads(sys.argv[1])]))
"""


def program(products=(), scaled_dots=0, **kernels):
    """Returns what a program has; none chooses between a kernel and XLA."""
    kernels = {f"{name}_kernel": count for name, count in kernels.items()}
    return {"kernels": kernels, "products": [*products], "choices": 0, "scaled_dots": scaled_dots}


IN_FP8 = ("f8E4M3FN f8E4M3FN", "f8E4M3FN f8E5M2", "f8E5M2 f8E4M3FN")
# Fprop, Dgrad (the gradient on the left, its rows sifted), Wgrad (on the right); none falls back to XLA.
FP8 = program(IN_FP8, quantize=3, carry_both=3, sift=1, correct=3)
TRITON = program(quantize=3, gemm=3)
# The products in XLA's own decomposition of a scaled dot.
SCALED_DOT = program(["bf16 bf16"], 3, quantize=3)
# The values are too large to keep: x and w are quantized once more for the backward pass.
XLA = program(["bf16 bf16"], quantize=5)
# Rungs between FP8 and MXFP4: the kernel quantizes every MXFP4 operand, whatever else reads its tensor.
MIXED = {
    policy: program(["bf16 bf16"], quantize=operands)
    for policy, operands in {"fprop": 2, "fprop_dgrad": 4, "only_wgrad": 2}.items()
}
ONLY_WGRAD_FP8 = program(IN_FP8, cast=3, quantize=1, quantize_pairs=1, carry_both=1, correct=1)


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
# Whose kernels are compiled, each of every target's once; other builds of them are test_compile.py's.
COMPILED = {("sm_100", "wgrad_hadamard", None), ("sm_90", "only_wgrad", None), *(case[:3] for case in MORE)}


@parametrize("cases", CASES, exhaustive=[MORE], ids=["wgrad", "full"])
def test_dot_and_its_gradients_lower_to_the_kernels(cases):
    """Lowers all cases in one process, which keeps what it compiles; stand-ins for kernels come last."""
    wanted = sorted((case[:3] for case in cases), key=lambda case: case not in COMPILED)
    given = json.dumps([(*case, case in COMPILED) for case in wanted])
    lowered = dict(zip(wanted, json.loads(run_compiled(DOT, given)), strict=True))
    assert lowered == {case[:3]: case[3] for case in cases}
