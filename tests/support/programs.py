"""The kernels in a lowered program, read out of its custom calls as jaxlib reads them."""

import dataclasses
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import zlib

import jax
import jax.numpy as jnp

import mxjax
from mxjax.kernels.call_message import MachineCode
from mxjax.numerics.delayed import Scales
from mxjax.recipes import as_policy
from mxjax.runtime.devices import Target, use_target


@dataclasses.dataclass(frozen=True)
class Call:
    """One launch of a kernel: its machine code, programs along each axis, and the arrays it is given."""

    opaque: bytes
    name: str
    image: bytes
    num_warps: int
    shared_bytes: int
    compute_capability: int
    grid: tuple[int, ...]
    arrays: int


TESTS = pathlib.Path(__file__).parents[1]


def run_compiled(script, *arguments, text=None, **environment):
    """Returns what a script or module prints in a process without a GPU and without the interpreter."""
    paths = os.pathsep.join(map(str, (TESTS, TESTS.parent, TESTS / "kernels")))
    variables = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    variables |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths} | environment
    command = [sys.executable, *(["-c", script] if "\n" in script else ["-m", script]), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, input=text)
    assert done.returncode == 0, done.stderr
    return done.stdout


def on_devices(devices: int, script, *arguments, **environment) -> list:
    """Returns the JSON lines that a script or module prints on virtual devices, in a process of its own.

    LLVM does not optimize, which would take longer than the programs run.
    """
    environment = {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} | environment
    return [json.loads(line) for line in run_compiled(script, *arguments, **environment).splitlines()]


def dot_and_gradients(policy, x, w, dy, key, implementation=None):
    """Returns `mxjax.dot(x, w)` and the gradients of x and w."""
    scales = Scales(*[jnp.float32(1)] * 3) if as_policy(policy).delayed else None
    dot = functools.partial(mxjax.dot, policy=policy, key=key, implementation=implementation, scales=scales)
    y, vjp = jax.vjp(dot, x, w)
    return y, *vjp(dy)


def dot_arguments(x_shape, d_out: int, dtype):
    """Draws x, w, dy and a key for `dot_and_gradients`."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = x_shape, (x_shape[-1], d_out), (*x_shape[:-1], d_out)
    x, w, dy = (jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=False))
    return x.astype(dtype), w, dy, keys[3]


def lower_dot(target: Target, policy, implementation=None):
    """Returns `mxjax.dot` and its gradients, lowered for a target that need not be there."""
    function = functools.partial(dot_and_gradients, policy, implementation=implementation)
    arguments = jax.eval_shape(lambda: dot_arguments((2, 64, 128), 128, jnp.bfloat16))
    with use_target(target):
        traced = jax.jit(function).trace(*arguments)
        return traced.lower(lowering_platforms=("rocm" if target.backend == "hip" else "cuda",))


def stand_in(capability: int):
    """Returns what takes the place of `lowering.compile_kernel` and compiles nothing."""
    return lambda kernel, *_: MachineCode(b"\x7fELF", kernel.__name__, 4, 0, 0, 1, capability)


def calls_of(text: str) -> list[Call]:
    """Returns the kernels that a program's text calls, in order."""
    return [read_call(_unescape(opaque)) for opaque in re.findall(r'opaque = "(.*?)"', text)]


def targets_of(text: str) -> set[str]:
    """Returns the names of the custom calls in a program's text.

    XLA's own on every backend, for memory that is not set, is left out.
    """
    return set(re.findall(r"custom_call @([\w$.]+)", text)) - {"AllocateBuffer"}


def fields_of(message: bytes) -> dict[int, list]:
    """Returns the fields of a protocol buffer by number: integers and bytes."""
    fields, at = {}, 0
    while at < len(message):
        tag, at = _varint(message, at)
        value, at = _varint(message, at)
        if tag & 7 == 2:
            value, at = message[at : at + value], at + value
        else:
            assert tag & 7 == 0, tag
        fields.setdefault(tag >> 3, []).append(value)
    return fields


def read_call(opaque: bytes) -> Call:
    """Returns the launch that a message describes."""
    [call] = fields_of(zlib.decompress(opaque))[1]
    call = fields_of(call)
    kernel = fields_of(call[1][0])
    image = fields_of(kernel[11][0])
    return Call(
        opaque=opaque,
        name=kernel[1][0].decode(),
        image=image[1][0],
        num_warps=kernel[2][0],
        shared_bytes=kernel[3][0],
        compute_capability=kernel[6][0],
        grid=tuple(call[axis][0] for axis in (2, 3, 4)),
        arrays=len(call[5]),
    )


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (message[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if message[at - 1] < 128:
            return value, at


def _unescape(escaped: str) -> bytes:
    """Returns the bytes of a string attribute, as MLIR writes them."""
    unescape = lambda m: b"\\" if m[1] == b"\\" else bytes.fromhex(m[1].decode())  # noqa: E731
    return re.sub(rb"\\(\\|[0-9A-F]{2})", unescape, escaped.encode())
