"""The message to jaxlib, decoded field by field; `test_launch_layer` hands such messages to jaxlib itself."""

import hashlib
import zlib

from support.programs import fields_of

from mxjax.kernels.call_message import MachineCode, encode_call

CODE = MachineCode(
    image=bytes(range(256)),  # longer than a length of one byte can say
    name="some_kernel",
    num_warps=8,
    shared_bytes=100_000,
    scratch_bytes=0,
    scratch_alignment=128,
    compute_capability=90,
)


def decode(message: bytes):
    """Returns the fields of the message, of its call and of its kernel."""
    outer = fields_of(zlib.decompress(message))
    call = fields_of(outer[1][0])
    return outer, call, fields_of(call[1][0])


def test_the_kernel():
    _, _, kernel = decode(encode_call(CODE, (3,), 2))
    image = fields_of(kernel.pop(11)[0])
    assert kernel == {
        1: [b"some_kernel"],
        2: [8],  # warps
        3: [100_000],  # shared memory
        4: [hashlib.sha256(CODE.image).hexdigest().encode()],  # in place of PTX
        6: [90],  # compute capability
        10: [1],  # CTAs of a cluster
    }
    assert image == {1: [CODE.image], 2: [b"some_kernel"], 3: [100_000]}


def test_the_call():
    """A grid has three axes; every array is a pointer aligned to 16 bytes."""
    outer, call, _ = decode(encode_call(CODE, (70_000, 5), 3))
    assert outer.keys() == {1, 4}
    assert outer[4] == [b"some_kernel"]
    assert call.keys() == {1, 2, 3, 4, 5}
    assert (call[2], call[3], call[4]) == ([70_000], [5], [1])
    arrays = [fields_of(array) for array in call[5]]
    assert [array.keys() for array in arrays] == [{1}] * 3
    assert [fields_of(array[1][0]) for array in arrays] == [{2: [16]}] * 3


def test_sizes_follow_the_arrays():
    _, call, _ = decode(encode_call(CODE, (1,), 1, (768, 0)))
    assert [fields_of(parameter) for parameter in call[5][1:]] == [{3: [768]}, {3: [0]}]  # int32


def test_scratch_memory_is_an_array_after_the_sizes():
    """And jaxlib is not told to allocate it."""
    _, call, kernel = decode(encode_call(CODE._replace(scratch_bytes=300), (1,), 1, (768,)))
    assert not {12, 13} & kernel.keys()
    *_, size, scratch = (fields_of(parameter) for parameter in call[5])
    assert size == {3: [768]}
    assert fields_of(scratch[1][0]) == {2: [128]}
