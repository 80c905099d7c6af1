"""What the kernels compute, as `Reference`s: text that whoever runs a code object can evaluate.

The expressions use numpy and the public functions of `mxjax` alone, none of the kernels.
"""

from mxjax.formats import BLOCK
from mxjax.fp8_carriers import SHIFTS, UNIT_BYTES
from mxjax.kernels.aot.builds import Reference, Side
from mxjax.kernels.quantize.launch_plan import LARGEST_ROTATION

PREAMBLE = '''\
import jax, jax.numpy as jnp, ml_dtypes, numpy as np, mxjax
rng = np.random.default_rng(0)
def same(got, expected, where=True):
    """Returns whether the bits are the same, any NaN for any other, where asked."""
    bits = f"u{expected.dtype.itemsize}"
    nan = np.isnan(got.astype(np.float64)) & np.isnan(expected.astype(np.float64))
    equal = (got.view(bits) == expected.view(bits)) | nan | ~np.asarray(where)
    return got.shape == expected.shape and got.dtype == expected.dtype and bool(np.all(equal))
'''
FLOAT = {"float32": "np.float32", "float16": "np.float16", "bfloat16": "ml_dtypes.bfloat16"}
FP8 = {"e4m3": "ml_dtypes.float8_e4m3fn", "e5m2": "ml_dtypes.float8_e5m2"}
_SIDES = ("row", "column")
_Sides = tuple[Side | None, Side | None]


def gemm(batch: int, m: int, n: int, k: int, dtype: str, shuffled: bool) -> Reference:
    """Returns out [batch, m, n] = lhs @ rhs.T of packed operands with scale bytes [batch, rows, k / 32]."""
    given, inputs, expected = {}, {}, {}
    for side, rows in (("lhs", m), ("rhs", n)):
        given[side] = f"rng.integers(0, 256, ({batch}, {rows}, {k // 2}), np.uint8)"
        given[f"{side}_bytes"] = f"rng.integers(126, 129, ({batch}, {rows}, {k // BLOCK}), np.uint8)"
        inputs[f"{side}_scales"] = _shuffled(f"{side}_bytes", batch, rows, k // BLOCK, shuffled)
        scales = f"jnp.asarray({side}_bytes.view(ml_dtypes.float8_e8m0fnu))"
        array = f"mxjax.MXArray(mxjax.unpack(jnp.asarray({side})), {scales}, None, 'mxfp4', -1, (1, 32))"
        expected[f"{side}_values"] = f"np.asarray(mxjax.dequantize({array})).astype(np.float64)"
    expected["exact"] = "lhs_values @ rhs_values.swapaxes(-1, -2)"
    expected["out"] = f"exact.astype({FLOAT[dtype]})"
    note = (
        "Scale bytes of 126 to 128 keep every partial sum a multiple of 2**-4, which float32 holds in any "
        f"order below 2**20. With others, of float32: np.all(abs(got - exact) <= {k} * 2.0**-24 * "
        "(abs(lhs_values) @ abs(rhs_values).swapaxes(-1, -2))); bfloat16 adds 2.0**-8 * abs(exact). "
        "A byte of 255 makes its row or column NaN."
    )
    return Reference(given, inputs, expected, {"out": "same(got, out)"}, note)


def _shuffled(name: str, batch: int, rows: int, blocks: int, shuffled: bool) -> str:
    """Returns the expression for `shuffle_scales` of `matmul.fp4_gemm`, of [batch, rows, blocks] bytes."""
    if not shuffled:
        return name
    more, more_blocks = -rows % 256, -blocks % 8
    tiles, eights = (rows + more) // 32, (blocks + more_blocks) // 8
    return (
        f"np.ascontiguousarray(np.pad({name}, ((0, 0), (0, {more}), (0, {more_blocks})), constant_values=127)"
        f".reshape({batch}, {tiles}, 2, 16, {eights}, 2, 4).transpose(0, 4, 1, 6, 3, 5, 2)"
        f".reshape({batch}, {eights}, {tiles * 256}))"
    )


def quantizer(shape: tuple[int, int, int], dtype: str, sides: _Sides) -> Reference:
    """Returns what the quantizer makes of x [1, *shape] for its rows and its columns."""
    b, r, c = shape
    # Ties, zeros of both signs, and where XLA does not flush them blocks whose scale byte is 0.
    tiny = dtype != "float16" and not any(side and side.rotation for side in sides)
    given = {
        "factor": f"np.exp2(rng.integers(-8, 8, (1, {b}, {r}, 1)))",
        "normal": f"rng.standard_normal((1, {b}, {r}, {c}))",
        "numbers": f"factor * np.where(rng.random((1, {b}, {r}, 1)) < 0.5, np.round(4 * normal) / 4, normal)",
    }
    if tiny:
        given["numbers"] = f"np.where(np.arange({c}) < 32, 2.0**-134, 1) * {given['numbers']}"
    given["x"] = f"np.where(rng.random(numbers.shape) < 0.002, np.inf, numbers).astype({FLOAT[dtype]})"
    words, signs = [], []
    expected, agrees = {}, {}
    for name, side, length, other in zip(_SIDES, sides, (c, r), (r, c), strict=True):
        word, sign = "[0, 0]", f"np.ones({LARGEST_ROTATION})"
        if side and side.operand.rounding == "stochastic":
            given[f"{name}_key"] = f"jax.random.key({len(given)})"
            word = f"np.asarray(jax.random.bits({name}_key, (2,), np.uint32))"
        if side and _signed(side):
            size = side.rotation.size
            given[f"{name}_signs"] = f"mxjax.random_signs(jax.random.key({len(given)}), {size})"
            sign = f"np.tile({name}_signs, {LARGEST_ROTATION // size})"
        words.append(word)
        signs.append(sign)
        if side:
            expected |= _side(name, side, length, other)
            agrees[f"{name}_words"] = f"same(got, {name}_words)"
            agrees[f"{name}_scales"] = f"same(got, {name}_scales)"
    inputs = {
        "scalars": f"np.concatenate([{', '.join(words)}, [0, 0, 0]]).astype(np.uint32)[None]",
        "signs": f"np.stack([{', '.join(signs)}]).astype(np.float32)[None]",
    }
    note = (
        "x may hold any values but, where it is rotated, subnormal ones, which XLA flushes to zero on CPUs."
    )
    return Reference(given, inputs, expected, agrees, note)


def _signed(side: Side) -> bool:
    return side.rotation is not None and side.rotation.signs != "none"


def _side(name: str, side: Side, length: int, other: int) -> dict[str, str]:
    """Returns what the kernel writes of one side, and what leads there."""
    o, axis = side.operand, -1 if name == "row" else -2
    # The blocked axis is the last of what is written.
    turned = "" if axis == -1 else ".swapaxes(-1, -2)"
    more = f"(0, {side.along(axis).padded(length) - length})"
    widths = f"(0, 0), (0, 0), (0, 0), {more}" if axis == -1 else f"(0, 0), (0, 0), {more}, (0, 0)"
    x = f"np.pad(x, ({widths}))"
    if side.rotation:
        signs = f", signs={name}_signs" if _signed(side) else ""
        x = f"np.asarray(mxjax.rotate({x}, {side.rotation.size}, axis={axis}{signs}))"
    key = f", key={name}_key" if o.rounding == "stochastic" else ""
    arguments = f"axis={axis}, scale_rule={o.scale_rule!r}, rounding={o.rounding!r}"
    arguments += f", block_shape={o.block_shape!r}, prescale={o.prescale!r}{key}"
    repeated = f".repeat(32, axis=-2)[..., :{other}, :]" if o.block_shape == (BLOCK, BLOCK) else ""
    steps = {
        f"{name}_x": f"{x}.astype(np.float32)",
        name: f"mxjax.quantize({name}_x, {arguments})",
        f"{name}_bytes": f"np.asarray({name}.scales).view(np.uint8){turned}{repeated}",
    }
    if side.form == "packed":
        words, scales = f"np.asarray(mxjax.pack({name})){turned}", f"{name}_bytes"
    else:
        # Not divided by the prescale.
        array = f"mxjax.MXArray({name}.elements, {name}.scales, None, 'mxfp4', {axis}, {name}.block_shape)"
        words, scales = f"np.asarray(mxjax.dequantize({array}, jnp.bfloat16)){turned}", f"{name}_bytes"
    return steps | {f"{name}_words": words, f"{name}_scales": scales}


def _carried(values: str, shift: str, scales: str, carrier: str) -> str:
    """Returns the expression for values [..., 32 blocks] times 2**shift in FP8; NaN where the scale is."""
    low, high = SHIFTS[carrier]
    exponent = f"np.repeat(np.clip({shift}, {low}, {high}), 32, axis=-1)"
    nan = f"np.repeat({scales} == 255, 32, axis=-1)"
    return f"np.where({nan}, np.float32(np.nan), np.ldexp({values}, {exponent})).astype({FP8[carrier]})"


def carrier(n: int, blocks: int, carrier: str, rows: int, width: int) -> Reference:
    """Returns what the carrier kernel makes of n rows of packed blocks, by programs of `rows` x `width`."""
    low, high = SHIFTS[carrier]
    given = {
        "empty": f"rng.random((1, {n}, {blocks}, 1)) < 0.2",
        "codes": f"np.where(empty, 0, rng.integers(0, 256, (1, {n}, {blocks}, 16))).astype(np.uint8)",
        "nan": f"rng.random((1, {n}, {blocks})) < 0.1",
        "scales": f"np.where(nan, 255, rng.integers(90, 124, (1, {n}, {blocks}))).astype(np.uint8)",
    }
    programs = (-(-n // rows), -(-blocks // width))
    expected = {
        "elements": "np.asarray(mxjax.unpack(jnp.asarray(codes))).astype(np.float32)",
        "finite": "np.where(scales == 255, 0, scales).astype(int)",
        "reference": f"np.clip(finite.max(-1) - {high}, *{UNIT_BYTES}).astype(np.uint8)",
        "shift": "scales.astype(int) - reference[..., None]",
        "out": _carried(f"elements.reshape(1, {n}, {BLOCK * blocks})", "shift", "scales", carrier),
        "outside": f"(shift < {low}) | (shift > {high})",
        "changed": "(outside & (scales < 255) & np.any(elements != 0, axis=-1))[0]",
        "parts": f"np.pad(changed, ((0, {-n % rows}), (0, {-blocks % width})))",
        "lost": f"parts.reshape({programs[0]}, {rows}, {programs[1]}, {width}).any((1, 3)).reshape(1, -1)"
        ".astype(np.uint8)",
    }
    inputs = {"words": f"codes.view(np.int32).reshape(1, {n}, {4 * blocks})"}
    agrees = {name: f"same(got, {name})" for name in ("out", "reference", "lost")}
    return Reference(given, inputs, expected, agrees, "")


def correction(batch: int, m: int, n: int, k: int, dtype: str, constants: dict[str, int]) -> Reference:
    """Returns what `correct_kernel` makes of out [batch, m, n]; its constants say whose each flag is."""
    product = gemm(batch, m, n, k, dtype, False)
    given, expected = dict(product.given), dict(product.expected)
    del expected["out"]
    # Elements were lost of the last rows of lhs in the first batch, of rhs in the second, of none in others.
    for place, side, rows, block in (
        (0, "lhs", m, constants["BLOCK_M"]),
        (1, "rhs", n, constants["BLOCK_N"]),
    ):
        each, parts = constants["ROWS"], constants["PARTS"]
        programs, strips = -(-rows // each), -(-rows // block)
        given[f"{side}_reference"] = f"rng.integers(77, 178, ({batch}, {rows})).astype(np.uint8)"
        flag = f"np.arange({batch})[:, None] == {place}"
        last = f"np.arange({programs * parts}) == {programs * parts - 1}"
        given[f"{side}_lost"] = f"(({flag}) & ({last})).astype(np.uint8)"
        lost = f"np.repeat({side}_lost.reshape({batch}, {programs}, {parts}).any(2), {each}, 1)[:, :{rows}]"
        strip = f"np.pad({lost}, ((0, 0), (0, {-rows % block}))).reshape({batch}, {strips}, {block}).any(2)"
        expected[f"{side}_strips"] = f"np.repeat({strip}, {block}, 1)[:, :{rows}]"
        expected[f"{side}_exponent"] = f"{side}_reference.astype(int) - 127"
        expected[f"{side}_factors"] = f"np.ldexp(np.float32(1), {side}_exponent)"
    given["before"] = f"rng.standard_normal(({batch}, {m}, {n})).astype({FLOAT[dtype]})"
    expected["exponent"] = "lhs_exponent[:, :, None] + rhs_exponent[:, None, :]"
    expected["anew"] = f"np.ldexp(exact, -exponent).astype({FLOAT[dtype]})"
    expected["out"] = "np.where(lhs_strips[:, :, None] | rhs_strips[:, None, :], anew, before)"
    agrees = {name: f"same(got, {name})" for name in ("out", "lhs_factors", "rhs_factors")}
    note = "References of 77 to 177 keep what is divided by their factors normal. " + product.note
    return Reference(given, dict(product.inputs), expected, agrees, note)
