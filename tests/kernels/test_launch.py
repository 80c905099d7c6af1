"""Programs with kernels lower for CUDA and ROCm without a GPU, and jaxlib's own code takes what they say."""

import hashlib
import json
import zlib

import pytest
from support.marks import parametrize
from support.programs import fields_of, run_compiled
from support.rocm import install_extension

import mxjax
from mxjax.kernels.call_message import MachineCode, encode_call

pytestmark = pytest.mark.slow

LDS = 160 * 1024  # bytes of a compute unit of gfx950
AMDGPU = 224  # a machine in an ELF file's header


LOWER = """
import hashlib, json, sys
from mxjax.runtime.devices import Target
from support.programs import calls_of, lower_dot, targets_of

backend, arch, *policies = sys.argv[1:]
for policy in policies:
    text = lower_dot(Target(backend, arch), policy).as_text()
    calls = [
        {
            "name": c.name,
            "opaque": c.opaque.hex(),
            "machine": int.from_bytes(c.image[18:20], "little"),
            "image": hashlib.sha256(c.image).hexdigest(),
            "bytes": len(c.image),
            "warps": c.num_warps,
            "shared": c.shared_bytes,
            "capability": c.compute_capability,
            "grid": c.grid,
            "arrays": c.arrays,
        }
        for c in calls_of(text)
    ]
    program = hashlib.sha256(text.encode()).hexdigest()
    said = {"policy": policy, "program": program, "calls": calls, "targets": sorted(targets_of(text))}
    print(json.dumps(said))
"""


def lower(backend, arch, *policies, **environment):
    return [
        json.loads(line) for line in run_compiled(LOWER, backend, arch, *policies, **environment).splitlines()
    ]


@pytest.fixture(scope="module")
def rocm_program():
    """Returns the calls of a dot and its gradients, lowered for gfx950."""
    [program] = lower("hip", "gfx950", "wgrad_rht")
    return program


EVERY_GEMM = r"""
import dataclasses, json, re, sys
import jax, jax.numpy as jnp
import mxjax
from models import decoder
from mxjax.runtime.devices import Target, use_target
from mxjax.kernels import lowering
from mxjax.kernels.call_message import MachineCode
from support.llamas import SMALL, layer_policies
from support.programs import targets_of

NVIDIA = r"(?i)\w*(?:cuda|cudnn|cublas|nvidia|nvvm|ptx)\w*|\bsm_\d+"
lowering.compile_kernel = lambda *_: MachineCode(b"\x7fELF", "kernel", 4, 0, 0, 1, 0)
key = jax.eval_shape(lambda: jax.random.key(0))
every = [name for name, policy in mxjax.policies().items() if not policy.delayed]  # for attention too
for policy, head in [*((policy, 16) for policy in sys.argv[1:] or every), ("bf16", 64)]:
    config = dataclasses.replace(SMALL, n_layers=1, head_dim=head)
    policies = layer_policies(config, policy, [("*", policy)])

    def loss(params, batch, key):
        return decoder.mean_loss(config, params, batch, policies=policies, key=key)

    batch = jax.ShapeDtypeStruct((1, 2049 if (policy, head) == ("bf16", 16) else 65), jnp.int32)
    with use_target(Target("hip", "gfx950")):
        traced = jax.jit(jax.value_and_grad(loss)).trace(decoder.abstract_params(config), batch, key)
        text = traced.lower(lowering_platforms=("rocm",)).as_text()
    print(json.dumps([policy, sorted(targets_of(text)), re.findall(NVIDIA, text)]))
"""


@parametrize("policies", ("bf16", "wgrad_sr", "nvfp4"), exhaustive=[()], ids=["kinds", "every"])
def test_no_program_for_rocm_names_anything_of_nvidia(policies):
    """With every GEMM of a Llama in each policy: head and attention too, in pieces and fused for bf16."""
    programs = [json.loads(line) for line in run_compiled(EVERY_GEMM, *policies).splitlines()]
    every = [name for name, policy in mxjax.policies().items() if not policy.delayed]
    assert len(programs) == 1 + len(policies or every)
    assert programs[-1][1] == ["triton_kernel_call_ffi"]  # bf16 with heads of 64: fused attention alone
    for policy, targets, names in programs:
        assert (targets or ["triton_kernel_call_ffi"], names) == (["triton_kernel_call_ffi"], []), policy


START = r"""
import jax, jax.numpy as jnp
import mxjax
from mxjax.runtime.devices import Target, use_target
from mxjax.kernels import lowering
from mxjax.kernels.call_message import MachineCode

compiled = []
def compile_kernel(kernel, *_):
    compiled.append(kernel.__name__)
    return MachineCode(b"\x7fELF", kernel.__name__, 4, 0, 0, 1, 0)

lowering.compile_kernel = compile_kernel
x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((64, 128), (128, 32)))
with use_target(Target("hip", "gfx950")):
    traced = jax.jit(lambda x, w: mxjax.dot(x, w, policy="wgrad")).trace(x, w)
    print(len(compiled))
    lowering.start_traced()
    lowering._pool().shutdown()
    print(len(compiled))
    traced.lower(lowering_platforms=("rocm",))
    print(len(compiled))

with use_target(Target("cuda", "sm_90")):
    for rows in (512, 4096):
        x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((rows, 256), (256, 128)))
        jax.jit(lambda x, w: mxjax.dot(x, w, policy="wgrad")).trace(x, w)
print(len(set(lowering._traced)))
"""


def test_traced_kernels_start_early_compile_once_and_serve_any_number_of_rows():
    """On gfx950 the forward pass quantizes x and w, and multiplies them.

    On Hopper two of its kernels quantize, one carries both operands in FP8, and one corrects their product.
    """
    assert run_compiled(START).split() == ["0", "3", "3", "4"]


@parametrize("cached", True, exhaustive=[False])
def test_a_program_is_the_same_when_it_is_lowered_again(rocm_program, tmp_path, cached):
    """In another process, after others, wherever it runs, and whether or not Triton's cache has kernels."""
    environment = {"PYTHONHASHSEED": "7", "TMPDIR": str(tmp_path)}
    environment |= {} if cached else {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    _, first, second = lower("hip", "gfx950", "wgrad", "wgrad_rht", "wgrad_rht", **environment)
    assert first == second == rocm_program
    assert [p.name for p in tmp_path.iterdir()] == ([] if cached else ["cache"])
    for call in rocm_program["calls"]:
        assert (call["machine"], call["capability"]) == (AMDGPU, 0)
        assert call["shared"] <= LDS


def test_transformations_of_calls():
    said = json.loads(run_compiled("support.calls"))
    assert said["aliased"] == ["0"]
    assert said["barriers"] == [2, 0]  # XLA sees neither what a call works in, nor its result, as a slice
    assert [said[name] for name in ("unused", "remat", "twice", "sharded")] == [0, 1, 2, True]
    assert "double_kernel was traced for gfx950, and cannot be lowered for cuda" in said["other platform"]
    assert "double_kernel takes pointers to x, y; it was called with 3 arrays" in said["arrays"]


def test_the_message_of_a_kernel_for_cuda():
    """Scratch memory is an array after the sizes, and jaxlib is not told to allocate it."""
    code = MachineCode(b"\x7fELF", "kernel", 8, 100_000, 300, 128, 90)
    call = fields_of(fields_of(zlib.decompress(encode_call(code, (1,), 1, (768, 0))))[1][0])
    kernel = fields_of(call[1][0])
    assert not {12, 13} & kernel.keys()
    assert kernel[4] == [hashlib.sha256(code.image).hexdigest().encode()]  # in place of PTX
    assert kernel[6] == [90]  # compute capability
    array, *sizes, scratch = (fields_of(parameter) for parameter in call[5])
    assert fields_of(array[1][0]) == {2: [16]}  # aligned to 16 bytes
    assert sizes == [{3: [768]}, {3: [0]}]  # int32
    assert fields_of(scratch[1][0]) == {2: [128]}


LAUNCH = """
import json, pathlib, sys

from support.rocm import Runtime

runtime = Runtime(pathlib.Path(sys.argv[1]))
for line in sys.stdin:
    call, lds = json.loads(line)
    pointers = [4096 * (i + 1) for i in range(call["arrays"])]
    try:
        opaque, sizes = bytes.fromhex(call["opaque"]), call.get("sizes", 0)
        notes, image = runtime.launch(opaque, pointers, call["bytes"], lds, sizes)
    except RuntimeError as error:
        notes, image = [str(error)], b""
    print(json.dumps([notes, image.hex()]))
"""


@pytest.fixture(scope="module")
def extension(tmp_path_factory):
    return install_extension(tmp_path_factory.mktemp("rocm"))


def launch(extension, calls):
    """Returns HIP's notes and the image that it loads for each call and bytes of LDS."""
    answers = run_compiled(LAUNCH, extension, text="".join(json.dumps(call) + "\n" for call in calls))
    return [json.loads(line) for line in answers.splitlines()]


def test_jaxlib_launches_on_hip_what_the_program_says(rocm_program, extension):
    """64 threads a wave; pointers in order, then those of two buffers that no kernel of ours has."""
    distinct = {call["opaque"]: call for call in rocm_program["calls"]}.values()
    for call, (notes, image) in zip(distinct, launch(extension, [(c, LDS) for c in distinct]), strict=True):
        pointers = [4096 * (i + 1) for i in range(call["arrays"])]
        numbers = [*call["grid"], 64 * call["warps"], 1, 1, call["shared"], *pointers, 0, 0]
        assert notes[-1] == " ".join(["launch", *map(str, numbers)])
        assert notes[:2] == ["load", f"function {call['name']}"]
        assert hashlib.sha256(bytes.fromhex(image)).hexdigest() == call["image"]


def test_jaxlib_passes_sizes(extension):
    """After the pointers, as integers of 32 bits."""
    code = MachineCode(b"\x7fELF", "sized", 8, 0, 0, 1, 0)
    call = {"opaque": encode_call(code, (1,), 1, (768, 2**31 - 1)).hex(), "arrays": 1, "sizes": 2, "bytes": 4}
    [(notes, _)] = launch(extension, [(call, LDS)])
    pointer, *sizes, first, second = map(int, notes[-1].split()[8:])
    assert (pointer, first, second) == (4096, 0, 0)
    assert [size & (2**32 - 1) for size in sizes] == [768, 2**31 - 1]


def test_jaxlib_asks_hip_for_more_than_48_kib(extension):
    """The answer to attribute 74, what a block may opt in to, must be at least what the kernel takes."""
    calls = []
    for name, lds in (("enough", LDS), ("little", 64 * 1024)):
        code = MachineCode(b"\x7fELF" + name.encode(), name, 8, 100_000, 0, 1, 0)
        calls.append(({"opaque": encode_call(code, (1,), 1).hex(), "arrays": 1, "bytes": 10}, lds))
    (enough, _), (little, _) = launch(extension, calls)
    assert "attribute 74" in enough
    assert enough[-1] == "launch 1 1 1 512 1 1 100000 4096 0 0"
    assert "exceeds device resources (65536 b)" in little[0]
