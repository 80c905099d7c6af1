"""The message in which a program tells jaxlib which kernel to launch, and how.

jaxlib's custom call `triton_kernel_call_ffi` reads a zlib-compressed protocol buffer from its attribute
`opaque`: `jax_triton.TritonAnyKernelCall`. Its field `module_image` holds machine code: then jaxlib runs no
ptxas and reads no file. jaxlib's Python bindings cannot write it, so the message is written here. Tests
hand such messages to jaxlib's own code.
"""

import hashlib
import zlib
from collections.abc import Sequence
from typing import NamedTuple

ALIGNMENT = 16
"""Bytes that every pointer is a multiple of: kernels are compiled for it, and jaxlib checks it."""


class MachineCode(NamedTuple):
    """A compiled kernel.

    Attributes:
      image: an ELF file, CUDA's cubin or HIP's code object.
      name: the kernel's symbol in it.
      num_warps: warps a program, each as wide as the device's.
      shared_bytes: shared memory of a program.
      scratch_bytes, scratch_alignment: global scratch memory of a program, for tensor descriptors.
      compute_capability: 90 for sm_90, 0 on HIP.
    """

    image: bytes
    name: str
    num_warps: int
    shared_bytes: int
    scratch_bytes: int
    scratch_alignment: int
    compute_capability: int


def encode_call(code: MachineCode, grid: Sequence[int], arrays: int, sizes: Sequence[int] = ()) -> bytes:
    """Returns the message that launches `code` on `grid`.

    Args:
      arrays: number of arrays to whose memory the kernel takes pointers, its first arguments.
      sizes: its other arguments, int32. If the kernel needs scratch memory, that is one more array, which
        comes last, as Triton's kernels take it: jaxlib would allocate it in every launch, and a CUDA graph
        with such an allocation cannot be part of another, as XLA's command buffers need it.
    """
    x, y, z = (*grid, 1, 1)[:3]
    image = _text(1, code.image) + _text(2, code.name.encode()) + _number(3, code.shared_bytes)
    kernel = _text(1, code.name.encode()) + _number(2, code.num_warps) + _number(3, code.shared_bytes)
    # In place of PTX its digest: jaxlib keeps loaded kernels by name and by this text.
    kernel += _text(4, hashlib.sha256(code.image).hexdigest().encode())
    kernel += _number(6, code.compute_capability) + _number(10, 1) + _text(11, image)
    call = _text(1, kernel) + _number(2, x) + _number(3, y) + _number(4, z)
    call += _text(5, _text(1, _number(2, ALIGNMENT))) * arrays
    call += b"".join(_text(5, _number(3, size)) for size in sizes)
    if code.scratch_bytes:
        call += _text(5, _text(1, _number(2, code.scratch_alignment)))
    return zlib.compress(_text(1, call) + _text(4, code.name.encode()))


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _text(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    digits = []
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    return bytes([*digits, value])
