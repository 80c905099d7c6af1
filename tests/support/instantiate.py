"""jaxlib's compile-time step for a kernel call, which wants a GPU's context, run on the CPU.

    python -m support.instantiate EXTENSION

reads messages from standard input, one line of hexadecimal digits each, and prints for each "accepted" or
jaxlib's error. XLA asks for the GPU's compute capability through a table of its own functions; here one of
them answers, without a value, in place of XLA's.
"""

import ctypes
import importlib
import sys

import jax
import jax.numpy as jnp

from support.rocm import pointer_of

WORD = ctypes.c_void_p
FRAME_API = 2  # words of XLA_FFI_CallFrame and XLA_FFI_Api
API_INTERNAL = 5
SLOTS = range(10, 30)
HANDLER = ctypes.CFUNCTYPE(WORD, WORD)


@ctypes.CFUNCTYPE(WORD, WORD, ctypes.POINTER(WORD))
def no_capability(context, out):
    """Answers XLA_FFI_INTERNAL_GpuComputeCapability_Get."""
    out[0] = None


class Instantiation:
    """The handler of an extension, with the function of one slot of XLA's internal table replaced."""

    def __init__(self, handlers):
        self.real = HANDLER(pointer_of(handlers["instantiate"]))
        self.slot, self.kept = 0, []
        self.handler = HANDLER(self.run)
        bundle = {"instantiate": jax.ffi.pycapsule(self.handler), "execute": handlers["execute"]}
        jax.ffi.register_ffi_target("instantiate_kernel", bundle, platform="cpu")

    def run(self, frame):
        words = (WORD * 8).from_address(frame)
        address = words[FRAME_API]
        if words[FRAME_API + 1] is None:  # XLA asks about the handler
            return self.real(frame)
        size = (ctypes.c_size_t * 1).from_address(address)[0] // 8
        api = (WORD * size).from_buffer_copy((WORD * size).from_address(address))
        table = (WORD * 40).from_buffer_copy((WORD * 40).from_address(api[API_INTERNAL]))
        table[self.slot] = ctypes.cast(no_capability, WORD).value
        api[API_INTERNAL] = ctypes.addressof(table)
        words[FRAME_API] = ctypes.addressof(api)
        self.kept += [api, table]
        error = self.real(frame)
        words[FRAME_API] = address
        return error

    def answer(self, opaque: bytes) -> str:
        call = jax.ffi.ffi_call("instantiate_kernel", jax.ShapeDtypeStruct((8,), jnp.float32))
        try:
            jax.jit(lambda x: call(x, opaque=opaque)).lower(jnp.zeros(8)).compile()
        except jax.errors.JaxRuntimeError as error:
            return str(error).splitlines()[0]
        return "accepted"

    def find_slot(self) -> None:
        """Finds the slot with which the handler gets as far as the message."""
        for self.slot in SLOTS:
            if "uncompress" in self.answer(b"no message"):
                return
        raise SystemExit("no slot of XLA's internal table answers for the GPU")


def main() -> None:
    module = importlib.import_module(sys.argv[1])
    instantiation = Instantiation(module.registrations()["triton_kernel_call_ffi"])
    instantiation.find_slot()
    for line in sys.stdin:
        print(instantiation.answer(bytes.fromhex(line)), flush=True)


if __name__ == "__main__":
    main()
