"""Expected results of each kernel, computed by numpy and by the definitions in `mxjax`.

Every kind of kernel has two functions that take the same keyword arguments: KIND_inputs draws example inputs,
and KIND_outputs computes the outputs for any inputs. A build's record names the kind and the arguments, and
`mxjax.kernels.cases.check` calls the functions. Nothing here may import a kernel or Triton: expected results
must not depend on the code that they check.
"""

import itertools

import ml_dtypes
import numpy as np

from mxjax.numerics.formats import BLOCK
from mxjax.operands.carriers import CARRIER_DTYPES, LEAST_FACTOR, SHIFTS, UNIT_BYTES, Carrier, group_of

E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
Arrays = dict[str, np.ndarray]


def decode(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the float64 values of packed E2M1 codes [..., k / 2] with scale bytes [..., k / 32]."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    factors = np.where(scales == 255, np.nan, np.ldexp(1.0, scales.astype(int) - 127))
    return E2M1[codes] * np.repeat(factors, BLOCK, axis=-1)


def gemm_inputs(*, batch: int, m: int, n: int, k: int, shuffled: bool, **_: object) -> Arrays:
    """Draws packed operands with scale bytes from 126 to 128.

    With these, float32 holds every partial sum in any order: multiples of 2**-4 below 2**20. With others a
    float32 result may differ from the exact one by k * 2**-24 * (|lhs| @ |rhs|.T), and a bfloat16 result by
    another 2**-8 * |exact|. A scale byte of 255 makes its row or column NaN.
    """
    return _draw_operands((batch, m), (batch, n), k, shuffled)


def _draw_operands(lhs: tuple[int, int], rhs: tuple[int, int], k: int, shuffled: bool) -> Arrays:
    rng, arrays = np.random.default_rng(0), {}
    for side, shape in (("lhs", lhs), ("rhs", rhs)):
        arrays[side] = rng.integers(0, 256, (*shape, k // 2), np.uint8)
        scales = rng.integers(126, 129, (*shape, k // BLOCK), np.uint8)
        arrays[f"{side}_scales"] = shuffle(scales) if shuffled else scales
    return arrays


def gemm_outputs(
    inputs: Arrays, *, m: int, n: int, k: int, dtype: str, shuffled: bool, **_: object
) -> Arrays:
    """Computes out [batch, m, n] = lhs @ rhs.T."""
    return {"out": _product(*_values(inputs, m, n, k, shuffled)).astype(dtype)}


def _values(inputs: Arrays, m: int, n: int, k: int, shuffled: bool) -> list[np.ndarray]:
    values = []
    for side, rows in (("lhs", m), ("rhs", n)):
        scales = inputs[f"{side}_scales"]
        values.append(decode(inputs[side], unshuffle(scales, rows, k // BLOCK) if shuffled else scales))
    return values


def grouped_rows_inputs(
    *, m: int, n: int, k: int, sizes: list[int], rows: int, run: int, shuffled: bool, **_: object
) -> Arrays:
    """Draws what `gemm_inputs` does: lhs [1, m, k], rhs [g, n, k] of experts, and where their rows are."""
    starts = _starts(sizes, run)
    experts = np.searchsorted(starts[1:], np.arange(m // run), side="right").astype(np.int32)
    ends = np.array([*np.cumsum([0, *sizes]), rows], np.int32)
    places = {"experts": experts, "starts": starts, "ends": ends}
    return _draw_operands((1, m), (len(sizes), n), k, shuffled) | places


def _starts(sizes: list[int], run: int) -> np.ndarray:
    """Returns the first run of each expert of so many rows, and the end of the last."""
    return np.cumsum([0, *(-(-size // run) for size in sizes)], dtype=np.int32)


def grouped_rows_outputs(
    inputs: Arrays,
    *,
    m: int,
    n: int,
    k: int,
    sizes: list[int],
    rows: int,
    run: int,
    dtype: str,
    shuffled: bool,
) -> Arrays:
    """Computes out [rows, n], each expert's rows of lhs times the transpose of its rhs; others are zero."""
    (lhs,), rhs = _values(inputs, m, n, k, shuffled)
    out = np.zeros((rows, n))
    for expert, size in enumerate(sizes):
        first, row = run * inputs["starts"][expert], inputs["ends"][expert]
        out[row : row + size] = _product(lhs[first : first + size], rhs[expert])
    return {"out": out.astype(dtype)}


def grouped_sums_inputs(
    *, m: int, n: int, k: int, sizes: list[int], run: int, shuffled: bool, **_: object
) -> Arrays:
    """Draws what `gemm_inputs` does, of one batch, and the first run of columns of each expert."""
    return _draw_operands((1, m), (1, n), k, shuffled) | {"starts": _starts(sizes, run)}


def grouped_sums_outputs(
    inputs: Arrays, *, m: int, n: int, k: int, run: int, dtype: str, shuffled: bool, **_: object
) -> Arrays:
    """Computes out [g, m, n], for each expert lhs @ rhs.T over its runs of columns."""
    (lhs,), (rhs,) = _values(inputs, m, n, k, shuffled)
    parts = [slice(*ends) for ends in itertools.pairwise(run * inputs["starts"])]
    return {"out": np.stack([_product(lhs[:, part], rhs[:, part]) for part in parts]).astype(dtype)}


def _product(lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    return lhs @ rhs.swapaxes(-1, -2)


def shuffle(scales: np.ndarray) -> np.ndarray:
    """Reorders scale bytes [batch, rows, blocks] as the gfx950 GEMM reads them.

    Pads with 127 to multiples of 256 rows and 8 blocks, and orders each 32 rows x 8 blocks so that the four
    bytes that a lane uses in turn are one word.
    """
    batch, rows, blocks = scales.shape
    padding = ((0, 0), (0, -rows % 256), (0, -blocks % 8))
    padded = np.pad(scales, padding, constant_values=127)
    tiles, eights = padded.shape[1] // 32, padded.shape[2] // 8
    parts = padded.reshape(batch, tiles, 2, 16, eights, 2, 4).transpose(0, 4, 1, 6, 3, 5, 2)
    return np.ascontiguousarray(parts).reshape(batch, eights, tiles * 256)


def unshuffle(shuffled: np.ndarray, rows: int, blocks: int) -> np.ndarray:
    """Restores the scale bytes [batch, rows, blocks] that `shuffle` reordered."""
    batch, eights, width = shuffled.shape
    parts = shuffled.reshape(batch, eights, width // 256, 4, 16, 2, 2).transpose(0, 2, 6, 4, 1, 5, 3)
    return parts.reshape(batch, width // 8, 8 * eights)[:, :rows, :blocks]


def carrier_inputs(*, rows: int, blocks: int, **_: object) -> Arrays:
    """Draws packed rows with zero and NaN blocks; not all of their scales fit into the carrier."""
    rng = np.random.default_rng(0)
    empty = rng.random((1, rows, blocks, 1)) < 0.2
    codes = np.where(empty, 0, rng.integers(0, 256, (1, rows, blocks, 16))).astype(np.uint8)
    is_nan = rng.random((1, rows, blocks)) < 0.1
    scales = np.where(is_nan, 255, rng.integers(90, 124, (1, rows, blocks))).astype(np.uint8)
    return {"words": codes.view(np.int32).reshape(1, rows, 4 * blocks), "scales": scales}


def carrier_outputs(
    inputs: Arrays, *, rows: int, blocks: int, carrier: Carrier, tile: list[int], has_groups: bool
) -> Arrays:
    """Computes the rows in FP8, each row's scale byte that stands for 1, and which rows lost elements.

    Args:
      tile: rows and blocks of one program.
      has_groups: whether the kernel also says which rows have elements that groups do not hold either.
    """
    low, high = SHIFTS[carrier]
    codes = inputs["words"].view(np.uint8).reshape(1, rows, 16 * blocks)
    scales = inputs["scales"]
    is_nan = scales == 255
    known = np.where(is_nan, 0, scales).astype(int)
    unit = np.clip(known.max(-1) - high, *UNIT_BYTES)
    shift = scales.astype(int) - unit[..., None]
    elements = decode(codes, np.full_like(scales, 127))
    nonzero = (elements != 0).reshape(*scales.shape, BLOCK).any(-1)
    lost = ((shift < low) | (shift > high)) & ~is_nan & nonzero
    factors = np.where(is_nan, np.nan, np.ldexp(1.0, np.clip(shift, low, high)))
    of_groups = known.reshape(1, rows, -1, group_of(blocks)).max(-1) - high
    of_groups = np.maximum(of_groups, unit[..., None] + LEAST_FACTOR).repeat(group_of(blocks), axis=-1)
    far = ((scales < low + of_groups) | (scales > high + of_groups)) & ~is_nan & nonzero
    far &= lost.any(-1, keepdims=True)
    # Not -0 in place of lost elements.
    out = np.where(np.repeat(lost, BLOCK, axis=-1), 0, elements * np.repeat(factors, BLOCK, axis=-1))
    outputs = {
        "out": out.astype(CARRIER_DTYPES[carrier]),
        "unit": unit.astype(np.uint8),
        "lost": _flags(lost, tile),
    }
    return outputs | ({"far": _flags(far, tile)} if has_groups else {})


def _flags(found: np.ndarray, tile: list[int]) -> np.ndarray:
    """Returns, for each tile of found [1, rows, blocks], a word with a bit for each row that has one."""
    rows, blocks = found.shape[1:]
    tiles = np.pad(found[0], ((0, -rows % tile[0]), (0, -blocks % tile[1])))
    tiles = tiles.reshape(-(-rows // tile[0]), tile[0], -(-blocks // tile[1]), tile[1]).any(3)
    bits = tiles.astype(np.uint32) << np.arange(tile[0], dtype=np.uint32)[:, None]
    return bits.sum(1).reshape(1, -1).astype(np.uint32)


def correction_inputs(
    *, batch: int, m: int, n: int, k: int, dtype: str, rows: dict[str, int], parts: int, groups: int
) -> Arrays:
    """Draws what `gemm_inputs` does, an earlier result, and factors and lost elements of both operands.

    The first row of the last part of lhs lost elements in the first batch, of rhs in the second. Bytes
    from 77 to 177 for a factor of 1 keep the result normal. All lost rows of lhs are far, so that
    the kernel multiplies the packed operands, whatever the FP8 arrays hold.
    """
    arrays = gemm_inputs(batch=batch, m=m, n=n, k=k, shuffled=False)
    rng = np.random.default_rng(1)
    for place, (side, length) in enumerate((("lhs", m), ("rhs", n))):
        arrays[f"{side}_unit"] = rng.integers(77, 178, (batch, length)).astype(np.uint8)
        lost = np.zeros((batch, -(-length // rows[side]) * parts), np.uint32)
        lost[place : place + 1, -1] = 1
        arrays[f"{side}_lost"] = lost
    arrays["lhs_far"] = arrays["lhs_lost"]
    for name, length, carrier in (("lhs_grouped", m, "e5m2"), ("rhs_fp8", n, "e4m3")):
        arrays[name] = np.zeros((batch, length, k), CARRIER_DTYPES[carrier])
    arrays["lhs_group_scales"] = np.zeros((batch, m, groups), np.uint8)
    arrays["before"] = rng.standard_normal((batch, m, n)).astype(dtype)
    return arrays


def correction_outputs(
    inputs: Arrays, *, batch: int, m: int, n: int, dtype: str, rows: dict[str, int], parts: int, **_: object
) -> Arrays:
    """Computes the row and column factors, and the result recomputed where elements were lost.

    Each of `parts` parts of so many `rows` of lhs, and of rhs, has a bit for each row.
    """
    exponents, affected, values = [], [], []
    for side, length in (("lhs", m), ("rhs", n)):
        words = np.bitwise_or.reduce(inputs[f"{side}_lost"].reshape(batch, -1, parts), axis=2)
        bits = words[..., None] >> np.arange(rows[side], dtype=np.uint32) & 1
        affected.append(bits.reshape(batch, -1)[:, :length] > 0)
        exponents.append(inputs[f"{side}_unit"].astype(int) - 127)
        values.append(decode(inputs[side], inputs[f"{side}_scales"]))
    exponent = exponents[0][:, :, None] + exponents[1][:, None, :]
    recomputed = np.ldexp(_product(*values), -exponent).astype(dtype)
    return {
        "out": np.where(affected[0][:, :, None] | affected[1][:, None, :], recomputed, inputs["before"]),
        "lhs_factors": np.ldexp(np.float32(1), exponents[0]),
        "rhs_factors": np.ldexp(np.float32(1), exponents[1]),
    }


def sifting_inputs(*, batch: int, m: int, n: int, dtype: str, rows: int, factor: float) -> Arrays:
    """Draws a result, NaN in some rows, flags, and bounds above and below the least elements of rows."""
    rng = np.random.default_rng(0)
    y = rng.standard_normal((batch, m, n)).astype(dtype)
    y[rng.random(y.shape) < 0.1 / n] = np.nan
    bound = 2.0 ** rng.integers(-4, 5, (batch, m)) * np.nanmin(abs(y.astype(np.float32)), axis=-1, initial=9)
    lost, far = rng.integers(0, 2**32, (2, batch, -(-m // rows)), np.uint32)
    return {"y": y, "lost_sum": (bound / factor).astype(np.float32), "lost": lost, "far": lost & far}


def sifting_outputs(inputs: Arrays, *, batch: int, m: int, rows: int, factor: float, **_: object) -> Arrays:
    """Finds which rows with a bit, `rows` of them a word, have an element below their bound, or NaN."""
    bound = (inputs["lost_sum"] * np.float32(factor))[..., None]
    found = ~(abs(inputs["y"].astype(np.float32)) >= bound).all(-1)

    def sifted(words: np.ndarray) -> np.ndarray:
        bits = words[..., None] >> np.arange(rows, dtype=np.uint32) & 1
        kept = np.pad(bits.reshape(batch, -1)[:, :m] * found, ((0, 0), (0, -m % 32))).reshape(batch, -1, 32)
        return (kept << np.arange(32)).sum(-1).astype(np.uint32)

    return {"still_lost": sifted(inputs["lost"]), "still_far": sifted(inputs["far"])}


def attention_inputs(
    *, which: str, b: int, s: int, g: int, r: int, h: int, is_masked: bool = False
) -> Arrays:
    """Draws q, k, v and dout, and computes lse and delta; `which` names the kernel.

    If `is_masked`, documents begin at 3 and at half the sequence, queries see 50 keys, and sinks are drawn.
    """
    rng = np.random.default_rng(0)
    shapes = {"q": (b, s, g, r, h), "k": (b, s, g, h), "v": (b, s, g, h), "dout": (b, s, g, r, h)}
    inputs = {name: rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}
    inputs |= {name: np.zeros((b, s), np.int32) for name in ("first_key", "queries_end")}
    inputs["sinks"] = np.zeros((b, g, r), np.float32)
    if is_masked:
        position = np.arange(s, dtype=np.int32)
        starts = np.where(position >= s // 2, s // 2, np.where(position >= 3, 3, 0))
        inputs["first_key"][:] = np.maximum(starts, position - 49)
        inputs["queries_end"][:] = np.searchsorted(inputs["first_key"][0], position, side="right")
        inputs["sinks"][:] = rng.standard_normal((b, g, r))
    forward = attention_outputs(inputs, which="forward", is_masked=is_masked)
    products = forward["out"].astype(np.float64) * inputs["dout"].astype(np.float64)
    return inputs | {
        "lse": forward["lse"],
        "delta": products.sum(-1).transpose(0, 2, 3, 1).astype(np.float32),
    }


def attention_outputs(inputs: Arrays, *, which: str, is_masked: bool = False, **_: object) -> Arrays:
    """Computes out and lse, dk and dv, or dq of causal attention in float64; gradients follow from lse."""
    q, k, v = (inputs[name].astype(np.float64) for name in ("q", "k", "v"))
    scale, s = q.shape[-1] ** -0.5, q.shape[1]
    scores = np.einsum("bsgrh,btgh->bgrst", q, k) * scale
    sees = np.tri(s, dtype=bool)
    if is_masked:
        sees = (sees & (np.arange(s) >= inputs["first_key"][..., None]))[:, None, None]
    scores = np.where(sees, scores, -np.inf)
    if which == "forward":
        lse = np.logaddexp.reduce(scores, axis=-1)
        if is_masked:
            lse = np.logaddexp(lse, inputs["sinks"].astype(np.float64)[..., None])
        out = np.einsum("bgrst,btgh->bsgrh", np.exp(scores - lse[..., None]), v)
        return {"out": out.astype(inputs["q"].dtype), "lse": lse.astype(np.float32)}
    dout = inputs["dout"].astype(np.float64)
    weights = np.exp(scores - inputs["lse"].astype(np.float64)[..., None])
    d_scores = np.einsum("bsgrh,btgh->bgrst", dout, v) - inputs["delta"].astype(np.float64)[..., None]
    d_scores *= weights * scale
    if which == "query_gradients":
        return {"dq": np.einsum("bgrst,btgh->bsgrh", d_scores, k).astype(inputs["q"].dtype)}
    dk = np.einsum("bgrst,bsgrh->btgh", d_scores, q)
    dv = np.einsum("bgrst,bsgrh->btgh", weights, dout)
    return {"dk": dk.astype(inputs["k"].dtype), "dv": dv.astype(inputs["v"].dtype)}
