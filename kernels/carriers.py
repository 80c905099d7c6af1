"""FP8 carriers of packed MXFP4 operands (`mxjax.carriers`) by a kernel: half a byte an element to one."""

import functools
import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Float, Int32, UInt8

from mxjax.carriers import DTYPES, SHIFTS, Carrier
from mxjax.kernels import references, shapes
from mxjax.kernels.builds import Argument, Build
from mxjax.kernels.elements import encode_fp8, scale_value
from mxjax.kernels.launch import Target, ceil_div, current_target, triton_call
from mxjax.kernels.partition import partitioned

BLOCKS = 256  # a program
_WORDS = 4  # of 8 elements, a block

# prmt takes a byte of {$4:$3} for each of 4 nibbles: the carrier of a code's magnitude. By a nibble's highest
# bit it spreads the sign of the byte instead, which for 0x80 tells negative codes (0xff) from others.
_DECODE = tl.constexpr("""{
.reg .b32 select, sign, rest;
and.b32 select, $2, 0x77777777;
prmt.b32 $0, $3, $4, select;
shr.u32 select, select, 16;
prmt.b32 $1, $3, $4, select;
mov.b32 sign, 0x80808080;
shr.u32 rest, $2, 16;
prmt.b32 rest, sign, sign, rest;
prmt.b32 sign, sign, sign, $2;
shl.b32 rest, rest, 7;
shl.b32 sign, sign, 7;
and.b32 rest, rest, 0x80808080;
and.b32 sign, sign, 0x80808080;
or.b32 $0, $0, sign;
or.b32 $1, $1, rest;
}""")


def carry_operand(
    elements: UInt8[Array, "*b n bytes"],
    scales: UInt8[Array, "*b n blocks"],
    reference: Int32[Array, ""],
    carrier: Carrier,
) -> tuple[Float[Array, "*b n k"], Bool[Array, ""]]:
    """Returns packed elements times 2**(scale byte - reference) in FP8, and whether none was lost."""
    rows, blocks = math.prod(scales.shape[:-1]), scales.shape[-1]
    words = jax.lax.bitcast_convert_type(elements.reshape(1, rows, _WORDS * blocks, 4), jnp.int32)
    carried, lost = _carry(carrier, current_target())(words, scales.reshape(1, rows, blocks), reference[None])
    fp8 = jax.lax.bitcast_convert_type(carried, DTYPES[carrier])
    return fp8.reshape(*elements.shape[:-1], 2 * elements.shape[-1]), ~jnp.any(lost != 0)


@functools.cache
def _carry(carrier: Carrier, target: Target | None):
    """Returns a function of words [v, n, 4 blocks], scales [v, n, blocks] and references [v]; vmap grows v.

    JAX keeps what it traced of the function, hence one for each target.
    """

    def call(words, scales, reference):
        v, n, blocks = scales.shape
        return triton_call(
            carry_kernel,
            words,
            scales,
            reference,
            out=[
                jax.ShapeDtypeStruct((v, n, 2 * _WORDS * blocks), jnp.int32),
                jax.ShapeDtypeStruct((v, n, blocks), jnp.uint8),
            ],
            grid=(ceil_div(n * blocks, BLOCKS), v),
            num_warps=4,
            **_constants(n * blocks, carrier, target),
        )

    @custom_vmap
    def run(words, scales, reference):
        rule, sizes, whole = "v n w, v n b, v -> v n o, v n b", {}, ["b", "w", "o"]
        blocks = scales.shape[2]
        if blocks > 1 and blocks % jax.device_count() == 0:
            rule, whole = "v n (b w), v n b, v -> v n (b o), v n b", ["w", "o"]
            sizes = {"b": blocks, "w": _WORDS, "o": 2 * _WORDS}
        return partitioned(call, rule, sizes, whole)(words, scales, reference)

    @run.def_vmap
    def _(size, batched, *args):
        args = [
            a if has_axis else jnp.broadcast_to(a, (size, *a.shape))
            for a, has_axis in zip(args, batched, strict=True)
        ]
        results = run(*(a.reshape(math.prod(a.shape[:2]), *a.shape[2:]) for a in args))
        results = [y.reshape(size, y.shape[0] // size, *y.shape[1:]) for y in results]
        return results, [True] * len(results)

    return run


def _constants(blocks: int, carrier: Carrier, target: Target | None) -> dict[str, int | bool]:
    low, high = SHIFTS[carrier]
    native = target is not None and target.backend == "cuda"
    constants: dict[str, int | bool] = {"N": blocks, "BLOCKS": BLOCKS, "LOW": low, "HIGH": high}
    return constants | {"E5M2": carrier == "e5m2", "NATIVE": native}


def builds(target: Target) -> list[Build]:
    """Returns builds of Llama 3.1 8B's operands and small ones, for targets that multiply FP8 and not FP4."""
    if target.arch != "sm_90":
        return []
    sizes = {t.rows * t.columns // 32 for tokens in shapes.TOKENS for t in shapes.tensors(tokens)}
    sizes |= {1, 33, BLOCKS, 2 * BLOCKS + 1}
    return [_build(size, carrier, target) for size in sorted(sizes) for carrier in DTYPES]


_ELEMENTS = "E2M1, eight a word, element 8 i + j in bits 4 j to 4 j + 3; [1, 4 words a block of 32]"


def _build(blocks: int, carrier: Carrier, target: Target) -> Build:
    return Build(
        name=f"carry_{blocks}_{carrier}",
        kernel=carry_kernel,
        signature={
            "words": Argument((1, _WORDS * blocks), "int32", False, _ELEMENTS),
            "scales": Argument((1, blocks), "uint8", False, "E8M0 bytes"),
            "reference": Argument((1,), "int32", False, "the scale byte that becomes a factor of 1"),
            "out": Argument(
                (1, 2 * _WORDS * blocks),
                "int32",
                True,
                "the elements times 2**(scale byte - reference), the shift clipped to LOW and HIGH",
                ((1, 32 * blocks), jnp.dtype(DTYPES[carrier]).name),
            ),
            "lost": Argument((1, blocks), "uint8", True, "1 where a block has elements that a shift changed"),
        },
        constants=_constants(blocks, carrier, target),
        grid=(ceil_div(blocks, BLOCKS), 1),
        reference=references.carrier(blocks, carrier),
    )


@triton.jit
def carry_kernel(
    words,
    scales,
    reference,
    out,
    lost,
    N: tl.constexpr,
    BLOCKS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    E5M2: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Carries BLOCKS of N blocks of words [v, 4 N] and scales [v, N]; out is [v, 8 N], lost [v, N]."""
    v = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    byte = tl.load(scales + v * N + block, block < N, 0).to(tl.int32)
    inside = (block < N)[:, None]
    word = tl.load(words + 4 * (v * N + block)[:, None] + tl.arange(0, 4)[None, :], inside, 0)
    shift = byte - tl.load(reference + v)
    holds_something = tl.max((word & 0x77777777).to(tl.uint32, bitcast=True), 1) > 0
    missed = (shift < LOW) & (byte < 255) & holds_something
    tl.store(lost + v * N + block, missed.to(tl.uint8), block < N)
    scale = scale_value(tl.where(byte == 255, 255, tl.minimum(tl.maximum(shift, LOW), HIGH) + 127))
    if NATIVE:
        magnitudes = (0 * scale, 0.5 * scale, scale, 1.5 * scale, 2 * scale, 3 * scale, 4 * scale, 6 * scale)
        small = encode_fp8(magnitudes, E5M2, True)
        low = tl.broadcast_to(small[0][:, None], word.shape)
        high = tl.broadcast_to(small[1][:, None], word.shape)
        first, second = tl.inline_asm_elementwise(
            _DECODE, "=&r,=&r,r,r,r", [word, low, high], (tl.int32, tl.int32), True, 1
        )
    else:
        values = ()
        for i in tl.static_range(8):
            values = values + (_code_value((word >> (4 * i)) & 15) * scale[:, None],)
        first, second = encode_fp8(values, E5M2, False)
    carried = tl.reshape(tl.join(first, second), [BLOCKS, 8])
    tl.store(out + 8 * (v * N + block)[:, None] + tl.arange(0, 8)[None, :], carried, inside)


@triton.jit
def _code_value(code):
    """Returns the values of E2M1 codes in float32."""
    magnitude = code & 7
    normal = (((magnitude >> 1) + 126) << 23) | ((magnitude & 1) << 22)
    bits = tl.where(magnitude < 2, magnitude * 0x3F000000, normal)
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)
