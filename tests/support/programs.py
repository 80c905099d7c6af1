"""The kernels in a lowered program, read out of its custom calls as jaxlib reads them."""

import dataclasses
import functools
import re
import zlib

import jax
import jax.numpy as jnp

import mxjax
from mxjax.devices import Target, use_target


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


def lower_dot(target: Target, policy, implementation=None):
    """Returns `mxjax.dot` and its gradients, lowered for a target that need not be there."""

    def all_three(x, w, dy, key):
        dot = functools.partial(mxjax.dot, policy=policy, key=key, implementation=implementation)
        y, vjp = jax.vjp(dot, x, w)
        return y, vjp(dy)

    with use_target(target):
        traced = jax.jit(all_three).trace(
            jax.ShapeDtypeStruct((2, 80, 128), jnp.bfloat16),
            jax.ShapeDtypeStruct((128, 96), jnp.float32),
            jax.ShapeDtypeStruct((2, 80, 96), jnp.float32),
            jax.eval_shape(lambda: jax.random.key(0)),
        )
        return traced.lower(lowering_platforms=("rocm" if target.backend == "hip" else "cuda",))


def calls_of(text: str) -> list[Call]:
    """Returns the kernels that a program's text calls, in order."""
    return [_read(_unescape(opaque)) for opaque in re.findall(r'opaque = "(.*?)"', text)]


def targets_of(text: str) -> set[str]:
    """Returns the names of the custom calls in a program's text."""
    return set(re.findall(r"custom_call @([\w$.]+)", text))


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


def _read(opaque: bytes) -> Call:
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
