"""Runs the PTX of inline assembly on numpy arrays, which Triton's interpreter cannot.

Source of the instructions' meanings: NVIDIA, Parallel Thread Execution ISA.
"""

import functools
import re

import ml_dtypes
import numpy as np

U32 = np.uint32


def run(text, **registers):
    """Runs a block of PTX on uint32 arrays, named "r3" for $3; returns all registers."""
    registers = {name.replace("r", "$"): np.asarray(value, U32) for name, value in registers.items()}
    with np.errstate(all="ignore"):
        for opcode, into, names in _instructions(text):
            if opcode == "mov.b64":  # {low, high}, wide
                high, wide = names[0], registers[names[1]]
                registers[into], registers[high] = wide.astype(U32), (wide >> np.uint64(32)).astype(U32)
                continue
            values = [registers[n] if n in registers else _number(n) for n in names]
            result = OPCODES[opcode](*values)
            registers[into] = np.asarray(result, np.uint64 if ".wide." in opcode else U32)
    return registers


@functools.cache
def _instructions(text):
    """Returns the opcode of each instruction, the name of its result, and those of its operands."""
    found = []
    for statement in re.sub(r"[{}]", "", text).split(";"):
        opcode, _, operands = statement.strip().partition(" ")
        if opcode and opcode != ".reg":
            into, *names = (name.strip() for name in operands.split(","))
            found.append((opcode, into, names))
    return found


@functools.cache
def _number(text):
    return U32(int(text[2:], 16) if text.startswith("0f") else int(text, 0))


def _halves(dtype, function):
    """Returns an instruction on two halves of a word, with as many operands as `function`."""

    def on_words(*words):
        halves = [np.asarray(w, "<u4")[..., None].view("<u2").view(dtype) for w in words]
        result = np.asarray(function(*halves)).astype(dtype)
        return np.ascontiguousarray(result).view("<u4")[..., 0]

    return on_words


def _f32(function):
    """Returns an instruction on float32, computed in float64."""
    return lambda *words: function(*(_float(w) for w in words)).astype(np.float32).view(U32)


def _float(word):
    return np.asarray(word, U32).view(np.float32).astype(np.float64)


def _add_up(a, b):
    """Returns a + b in float32, rounded up; `rest` is what the sum in float64 lost."""
    a, b = _float(a), _float(b)
    total = a + b
    rest = (a - (total - (total - a))) + (b - (total - a))
    rounded = total.astype(np.float32)
    return _next_above(rounded, (rounded < total) | ((rounded == total) & (rest > 0)))


def _fma(a, b, c):
    """Returns a * b + c in float32, rounded once: a sum that float64 rounds gets an odd last bit before."""
    product, c = _float(a) * _float(b), _float(c)
    total = product + c
    rest = (product - (total - (total - product))) + (c - (total - product))
    bits = total.view(np.int64)
    away = np.where((rest > 0) == (total > 0), 1, -1)
    odd = np.where((rest != 0) & (bits & 1 == 0) & np.isfinite(rest), bits + away, bits)
    return odd.view(np.float64).astype(np.float32).view(U32)


def _multiply_up(a, b):
    """Returns a * b in float32, rounded up; the product in float64 is exact."""
    product = _float(a) * _float(b)
    rounded = product.astype(np.float32)
    return _next_above(rounded, rounded < product)


def _next_above(x, where):
    """Returns the words of x [float32], of the next larger number where `where`."""
    return np.where(where, np.nextafter(x, np.float32(np.inf)), x).astype(np.float32).view(U32)


def _fma_bf16(a, b, c):
    a, b, c = (x.astype(np.float64) for x in (a, b, c))
    return (a * b + c).astype(np.float32)


def _prmt(a, b, select):
    """Selects bytes of {b, a}; a selector's highest bit replicates the byte's sign bit instead."""
    if np.ndim(select) == 0:
        return _select_bytes(a, b, int(select))
    both = np.asarray(b, np.uint64) << np.uint64(32) | a
    word = U32(0)
    for i in range(4):
        chosen = np.asarray(select >> U32(4 * i), np.uint64)
        byte = both >> (8 * (chosen & np.uint64(7))) & np.uint64(0xFF)
        byte = np.where(chosen & np.uint64(8), np.where(byte & np.uint64(0x80), 0xFF, 0), byte)
        word = word | byte.astype(U32) << U32(8 * i)
    return word


def _select_bytes(a, b, select):
    """Returns what `_prmt` does by one selector of all words."""
    word = U32(0)
    for i in range(4):
        chosen = select >> 4 * i
        byte = (b if chosen & 4 else a) >> U32(8 * (chosen & 3)) & U32(0xFF)
        if chosen & 8:
            byte = (byte >> U32(7)) * U32(0xFF)
        word = word | byte << U32(8 * i)
    return word


def _lop3(a, b, c, table):
    """Returns the bits that the table has for those of a, b and c; of each pair of a and b first."""
    table, word = int(table), U32(0)
    for i, pair in enumerate((~a & ~b, ~a & b, a & ~b, a & b)):
        of_c = table >> 2 * i & 3
        if of_c:
            word = word | (pair if of_c == 3 else pair & (c if of_c == 2 else ~c))
    return word


def _two_f16(high, low):
    return np.float16(_float(high)).view(np.uint16).astype(U32) << U32(16) | np.float16(_float(low)).view(
        np.uint16
    )


def _two_fp8(dtype):
    """Returns the conversion of two float32 to bytes, where infinities become the largest numbers."""
    most = float(ml_dtypes.finfo(dtype).max)

    def convert(high, low):
        high, low = (np.clip(_float(w), -most, most).astype(np.float32) for w in (high, low))
        return high.astype(dtype).view(np.uint8).astype(U32) << U32(8) | low.astype(dtype).view(np.uint8)

    return convert


def _two_bf16(high, low):
    high, low = (_float(w).astype(ml_dtypes.bfloat16).view(np.uint16).astype(U32) for w in (high, low))
    return high << U32(16) | low


OPCODES = {
    "mov.b32": lambda a, high=None: a if high is None else a | high << U32(16),
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "not.b32": np.invert,
    "shl.b32": np.left_shift,
    "shr.u32": np.right_shift,
    "add.u32": np.add,
    "sub.u32": np.subtract,
    "max.u32": np.maximum,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "mul.wide.u32": lambda a, b: np.asarray(a, np.uint64) * np.asarray(b, np.uint64),
    "max.u16x2": _halves(np.uint16, np.maximum),
    "min.u16x2": _halves(np.uint16, np.minimum),
    "add.s16x2": _halves(np.int16, np.add),
    "max.s16x2": _halves(np.int16, np.maximum),
    "abs.f16x2": lambda a: a & U32(0x7FFF7FFF),
    "abs.bf16x2": lambda a: a & U32(0x7FFF7FFF),
    "min.f16x2": _halves(np.float16, np.fmin),
    "max.bf16x2": _halves(ml_dtypes.bfloat16, np.fmax),
    "max.NaN.bf16x2": _halves(ml_dtypes.bfloat16, np.maximum),
    "mul.rn.bf16x2": _halves(ml_dtypes.bfloat16, lambda a, b: a.astype(np.float32) * b.astype(np.float32)),
    "fma.rn.bf16x2": _halves(ml_dtypes.bfloat16, _fma_bf16),
    "fma.rn.f32": _fma,
    "neg.f32": lambda a: a ^ U32(0x80000000),
    "add.rn.f32": _f32(np.add),
    "sub.rn.f32": _f32(np.subtract),
    "mul.rn.f32": _f32(np.multiply),
    "mul.rp.f32": _multiply_up,
    "min.f32": _f32(np.fmin),
    "abs.f32": lambda a: a & U32(0x7FFFFFFF),
    "add.rp.f32": _add_up,
    "ex2.approx.ftz.f32": _f32(np.exp2),
    "rcp.approx.ftz.f32": _f32(np.reciprocal),
    "cvt.rn.f16x2.f32": _two_f16,
    "cvt.rn.bf16x2.f32": _two_bf16,
    "cvt.rn.satfinite.e4m3x2.f32": _two_fp8(ml_dtypes.float8_e4m3fn),
    "cvt.rn.satfinite.e5m2x2.f32": _two_fp8(ml_dtypes.float8_e5m2),
}


def inline_asm_elementwise(asm, constraints, args, dtype, is_pure, pack, _semantic=None):
    """Replaces Triton's function in its interpreter, for 32-bit elements, or `pack` of 16 or 32 bits.

    Packed elements are neighbours on the last axis; a GPU's layout may pair others.
    """
    from triton.language import core
    from triton.runtime.interpreter import TensorHandle

    pack, n_outputs = int(pack), str(getattr(constraints, "value", constraints)).count("=")
    arrays = np.broadcast_arrays(*(a.handle.data for a in args))
    shape = list(arrays[0].shape)
    words = [word for a in arrays for word in _words(np.ascontiguousarray(a), pack)]
    registers = run(
        str(getattr(asm, "value", asm)), **{f"r{n_outputs + i}": word for i, word in enumerate(words)}
    )
    elements, results = (dtype if n_outputs > pack else (dtype,)), []
    for i, element in enumerate(elements):
        kind = {core.uint32: np.uint32, core.float32: np.float32}.get(element, np.int32)
        parts = [np.broadcast_to(registers[f"${pack * i + k}"], words[0].shape) for k in range(pack)]
        data = np.stack(parts, axis=-1).reshape(shape).view(kind)
        results.append(core.tensor(TensorHandle(data, element), core.block_type(element, shape)))
    return core.tuple(results) if n_outputs > pack else results[0]


def _words(array, pack):
    """Returns the registers of an argument: `pack` elements a register of 32 bits, or one each."""
    if array.dtype.itemsize == 2:
        assert pack == 2
        return [array.view(U32)]
    array = array.view(U32)
    return [np.ascontiguousarray(array[..., i::pack]) for i in range(pack)]
