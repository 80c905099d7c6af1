"""Programs lowered for ROCm, run without a GPU: XLA computes on the CPU, an emulator runs the kernels.

    emulation = Emulation(cache)
    y = emulation.run(function, *arrays)

`run` exports the function for ROCm, and XLA compiles that program for the CPU. Where the program calls
jaxlib's handler of Triton kernels, XLA calls the handler here. It takes machine code, grid, shared memory and
pointers from the call alone, and launches as HIP would: 64 threads a wave, pointers in order, then two null
pointers.

Source of the structures: xla/ffi/api/c_api.h, in jaxlib/include.
"""

import concurrent.futures
import ctypes
import math
import pathlib
import struct

import jax
import msgpack
import numpy as np
from gfx950 import machine
from gfx950.memory import BASE, GUARD, Memory

from mxjax.kernels.cases.assembly import amd_descriptor
from mxjax.kernels.cases.record import launch_values
from mxjax.runtime.devices import Target, use_target
from support.programs import Call, read_call

NAME = "triton_kernel_call_ffi"
WAVE, POINTER = 64, ctypes.c_void_p
DTYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 6: 1, 7: 2, 8: 4, 10: 2, 11: 4, 16: 2, 19: 1, 20: 1}
"""Bytes of XLA_FFI_DataType: PRED, S8 to S32, U8 to U32, F16, F32, BF16, F8E5M2 and F8E4M3FN."""


def plain(name, **fields):
    """Returns a structure of the C API."""
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


def structure(name, **fields):
    """Returns a structure that begins with its size and extensions, as most do."""
    return plain(name, size=ctypes.c_size_t, extension=POINTER, **fields)


Buffer = structure(
    "Buffer",
    dtype=ctypes.c_int,
    data=POINTER,
    rank=ctypes.c_int64,
    dims=ctypes.POINTER(ctypes.c_int64),
)
Arrays = structure(
    "Arrays", count=ctypes.c_int64, types=POINTER, buffers=ctypes.POINTER(ctypes.POINTER(Buffer))
)
Span = plain("Span", data=POINTER, length=ctypes.c_size_t)
SPANS = ctypes.POINTER(ctypes.POINTER(Span))
Attributes = structure("Attributes", count=ctypes.c_int64, types=POINTER, names=SPANS, values=SPANS)
Frame = structure(
    "Frame",
    api=POINTER,
    context=POINTER,
    stage=ctypes.c_int,
    inputs=Arrays,
    results=Arrays,
    attributes=Attributes,
    future=POINTER,
)
Version = structure("Version", major=ctypes.c_int, minor=ctypes.c_int)
Metadata = plain(
    "Metadata", size=ctypes.c_size_t, version=Version, traits=ctypes.c_uint32, state=ctypes.c_int64
)
Extension = plain("Extension", size=ctypes.c_size_t, kind=ctypes.c_int, next=POINTER, about=POINTER)
HANDLER = ctypes.CFUNCTYPE(POINTER, POINTER)


class Emulation:
    """Runs programs lowered for gfx950; `calls` are the kernels that it launched, in order.

    Args:
        cache: The folder of Triton's cache, where the assembly lies beside each code object.
    """

    def __init__(self, cache: pathlib.Path):
        self.cache = cache
        self.calls: list[Call] = []
        self.errors: list[BaseException] = []
        self.handler = HANDLER(self._handle)
        # XLA's threads on CPUs flush subnormal numbers to zero.
        self.thread = concurrent.futures.ThreadPoolExecutor(1)
        jax.ffi.register_ffi_target(NAME, jax.ffi.pycapsule(self.handler), platform="cpu")

    def run(self, function, *arrays):
        """Returns function(*arrays) as the program for ROCm computes it."""
        check = jax.export.DisabledSafetyCheck
        with use_target(Target("hip", "gfx950")):
            export = jax.export.export(
                jax.jit(function),
                platforms=("rocm",),
                disabled_checks=(check.custom_call(NAME), check.platform()),
            )
            program = export(*arrays)
        returned = jax.block_until_ready(program.call(*arrays))
        if self.errors:
            raise self.errors[0]
        return returned

    def _handle(self, address) -> None:
        frame = Frame.from_address(address)
        if frame.extension:  # XLA asks for the version
            about = Metadata.from_address(Extension.from_address(frame.extension).about)
            about.version.major, about.version.minor = 0, 1
            return
        if self.errors:
            return
        try:
            self.thread.submit(self._launch, frame).result()
        except BaseException as error:  # nothing may pass through C
            self.errors.append(error)

    def _launch(self, frame) -> None:
        call = read_call(opaque_of(frame.attributes))
        inputs, results = (
            [host_array(a.buffers[i].contents) for i in range(a.count)] for a in (frame.inputs, frame.results)
        )
        assert call.arrays == len(inputs) + len(results)
        self.calls.append(call)
        emulate(call, self.assembly(call.image), inputs, results)

    def assembly(self, image: bytes) -> str:
        """Returns the assembly of a code object."""
        [path] = [p for p in self.cache.glob("*/*.hsaco") if p.read_bytes() == image]
        return path.with_suffix(".amdgcn").read_text()


def opaque_of(attributes) -> bytes:
    for i in range(attributes.count):
        name, value = attributes.names[i].contents, attributes.values[i].contents
        if ctypes.string_at(name.data, name.length) == b"opaque":
            return ctypes.string_at(value.data, value.length)
    raise AssertionError("the call has no attribute opaque")


def host_array(buffer) -> np.ndarray:
    """Returns the bytes of an array of XLA's, in place."""
    size = DTYPE_BYTES[buffer.dtype] * math.prod(buffer.dims[i] for i in range(buffer.rank))
    return np.frombuffer((ctypes.c_uint8 * size).from_address(buffer.data), np.uint8)


def emulate(call: Call, text: str, inputs: list[np.ndarray], results: list[np.ndarray]) -> None:
    """Launches a kernel on copies of the arrays, in memory where nothing else may be touched."""
    arrays = [*inputs, *results]
    memory = Memory(BASE, sum(a.size + 2 * GUARD for a in arrays) + 4 * GUARD)
    placed = {a.ctypes.data: memory.allocate(a.size, 16) for a in arrays}
    for a in inputs:
        memory.at(placed[a.ctypes.data], a.size)[:] = a
    block = (WAVE * call.num_warps, 1, 1)
    segment = argument_segment(call, block, [placed[a.ctypes.data] for a in arrays])
    kernarg = memory.allocate(len(segment), 16)
    memory.at(kernarg, len(segment))[:] = np.frombuffer(segment, np.uint8)
    about = {
        "grid": call.grid,
        "block": block,
        "shared_bytes": call.shared_bytes,
        "descriptor": amd_descriptor(text),
    }
    machine.run(about, text, memory, kernarg)
    for a in results:
        a[:] = memory.at(placed[a.ctypes.data], a.size)


def argument_segment(call: Call, block: tuple[int, ...], pointers: list[int]) -> bytes:
    """Returns the arguments where the code object's metadata places them, as HIP does."""
    kernel = kernel_metadata(call.image)
    assert kernel[".name"] == call.name
    assert kernel[".wavefront_size"] == WAVE
    assert kernel[".max_flat_workgroup_size"] == block[0]
    values = launch_values(call.grid, block, call.shared_bytes)
    given = iter([*pointers, 0, 0])
    segment = bytearray(kernel[".kernarg_segment_size"])
    for a in kernel[".args"]:
        value = values[a[".value_kind"]] if a[".value_kind"].startswith("hidden_") else next(given)
        segment[a[".offset"] : a[".offset"] + a[".size"]] = value.to_bytes(a[".size"], "little")
    assert not list(given), "the kernel takes fewer arguments than it is given"
    return bytes(segment)


def kernel_metadata(code_object: bytes) -> dict:
    """Returns the metadata of the kernel in an ELF file's AMDGPU note, as a runtime reads it."""
    at = code_object.index(b"AMDGPU\0\0")
    _, size, kind = struct.unpack("<III", code_object[at - 12 : at])
    assert kind == 32  # NT_AMDGPU_METADATA
    [kernel] = msgpack.unpackb(code_object[at + 8 : at + 8 + size])["amdhsa.kernels"]
    return kernel
