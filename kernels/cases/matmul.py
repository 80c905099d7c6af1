"""The ahead-of-time builds of the FP4 GEMM and of kernels that carry operands in FP8 or correct products."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from mxjax.kernels.cases import shapes
from mxjax.kernels.cases.builds import Argument, Build, Expected
from mxjax.kernels.launch import ceil_div
from mxjax.kernels.matmul import carry, correct, grouped
from mxjax.kernels.matmul import lost_rows as sift
from mxjax.kernels.matmul.correct_kernel import correct_kernel
from mxjax.kernels.matmul.fp4_gemm import constants_of, gemm_kernel, grid_of, shuffle_scales
from mxjax.kernels.matmul.grouped_kernel import grouped_rows_kernel, grouped_sums_kernel
from mxjax.kernels.matmul.tiles import MORE_TILES, TILES, Tiles, choose_tiles, options_of, table_of
from mxjax.numerics.formats import BLOCK, E4M3
from mxjax.operands.carriers import CARRIER_DTYPES, Carrier
from mxjax.runtime.devices import Target

_ELEMENTS = "E2M1, two a byte along k, element 2 i in the low nibble; [batch, rows, k / 2]"
_SCALES = "E8M0 bytes, 2**(byte - 127), 255 is NaN; [batch, rows, k / 32]"
_SHUFFLED = (
    "E8M0 bytes, 2**(byte - 127), 255 is NaN; [batch, rows, k / 32] in the order of "
    "mxjax.kernels.cases.expected.shuffle: [batch, blocks / 8, rows * 8]"
)


def builds(target: Target) -> list[Build]:
    """Returns the builds of Llama 3.1 8B's GEMMs and of small ones, with every tile size of the target.

    Wgrad's result is float32, as its weights are; the others are bfloat16. CUDA's targets also build what
    carries operands in FP8, the correction of each product, and what finds its rows that need none.
    """
    sizes = [
        (shape, "float32" if shape.name.endswith("wgrad") else "bfloat16")
        for tokens in shapes.TOKENS
        for shape in shapes.gemms(tokens)
    ]
    sizes += [(shape, dtype) for shape in shapes.EDGE_GEMMS for dtype in ("bfloat16", "float32")]
    wanted = [build_gemm(*size, target) for size in sizes]
    if target.backend == "cuda":
        wanted += [_correction(*size, target) for size in sizes]
        wanted += _carries(target)
        wanted += [_sift(*size) for size in sizes if carry.rows_and_parts(size[0].k // 32)[1] == 1]
    wanted += [build_gemm(_small(tiles), "bfloat16", target, tiles) for tiles in TILES[table_of(target)]]
    wanted += _grouped_builds(target)
    return list({build.name: build for build in wanted}.values())


def candidate_builds(target: Target) -> list[Build]:
    """Returns a small build of each tile that nobody has timed yet."""
    found = []
    for tiles in MORE_TILES.get(table_of(target), ()):
        build = build_gemm(_small(tiles), "bfloat16", target, tiles)
        name = f"candidate_gemm_{tiles.m}x{tiles.n}x{tiles.k}_{tiles.warps}x{tiles.stages}"
        found.append(dataclasses.replace(build, name=name))
    return found


def _small(tiles: Tiles) -> shapes.GemmShape:
    """Returns a shape of few programs of these tiles, with remainders unless the tiles must fit exactly."""
    more = 0 if tiles.exact else 1
    k = _steps(tiles) * tiles.k + 32 * more
    return shapes.GemmShape("small", tiles.m + more, tiles.n + 3 * more, k, batch=2)


def _steps(tiles: Tiles) -> int:
    """Returns a number of tiles along k that make at least four passes of the loop on gfx950.

    So each LDS buffer is filled again. LLVM leaves no loop of fewer steps of 128, nor of five passes where a
    wave's share of a tile is small, and unrolls two passes of nine.
    """
    if tiles.k < 256:
        return 32
    return 2 * tiles.stages + 1 if tiles.m * tiles.n // tiles.warps > 2048 else 9


def build_gemm(shape: shapes.GemmShape, dtype: str, target: Target, tiles: Tiles | None = None) -> Build:
    """Returns the build of a GEMM, with the tiles that its shape chooses if `tiles` is None."""
    _, m, n, k, batch = shape
    return _build_product(
        Expected("gemm", {"batch": batch, "m": m, "n": n, "k": k, "dtype": dtype}),
        gemm_kernel,
        (f"gemm_{batch}x{m}x{n}x{k}_{dtype}", tiles or choose_tiles(m, n, k, batch, target), tiles is None),
        {"lhs": batch, "rhs": batch, "out": (batch, m, n)},
        {},
        {},
        "lhs @ rhs.T, summed in float32",
        target,
    )


def _grouped_builds(target: Target) -> list[Build]:
    """Returns grouped GEMMs with every tile of the target, and those of the experts of Mixtral 8x7B.

    Of the small ones' experts one has no rows, and one so many that its sums pass the loop four times.
    """
    found, run = [], grouped.RUN
    for tiles in TILES[table_of(target)]:
        _, m, n, k, _ = _small(tiles)
        found.append(_grouped_rows((run - 9, 0, 57), run + 100, n, k, target, tiles))
        found.append(_grouped_sums((_steps(tiles) * tiles.k - 9, 0, 1), m, n, target, tiles))
    rows = shapes.EXPERT_ROWS
    sizes = (rows // shapes.EXPERTS,) * shapes.EXPERTS
    d_in, d_out = shapes.EXPERT
    found += [_grouped_rows(sizes, rows, *widths, target) for widths in ((d_out, d_in), (d_in, d_out))]
    return [*found, _grouped_sums(sizes, d_in, d_out, target)]


_EXPERTS = "the expert of each run of RUN rows, g for none"
_STARTS = "the first run of each expert, then the end of the last"
_ENDS = "0, the end of each expert's rows, and the number of rows"


def _grouped_rows(
    sizes: tuple[int, ...], rows: int, n: int, k: int, target: Target, tiles: Tiles | None = None
) -> Build:
    """Returns the build of rows times their experts' matrices, of experts with so many of the rows."""
    groups, m = len(sizes), _filled(sizes, rows)
    name = f"grouped_rows_{groups}x{rows}x{n}x{k}"
    places = {
        "experts": Argument((m // grouped.RUN,), "int32", meaning=_EXPERTS),
        "starts": Argument((groups + 1,), "int32", meaning=_STARTS),
        "ends": Argument((groups + 2,), "int32", meaning=_ENDS),
    }
    arguments = {"m": m, "n": n, "k": k, "sizes": sizes, "rows": rows, "run": grouped.RUN}
    return _build_product(
        Expected("grouped_rows", arguments | {"dtype": "bfloat16"}),
        grouped_rows_kernel,
        (name, tiles or choose_tiles(m, n, k, 1, target), tiles is None),
        {"lhs": 1, "rhs": groups, "out": (rows, n)},
        places,
        {"GROUPS": groups, "RUN": grouped.RUN},
        "each expert's rows of lhs times the transpose of its rhs, summed in float32; zeros for no expert's",
        target,
    )


def _grouped_sums(
    sizes: tuple[int, ...], m: int, n: int, target: Target, tiles: Tiles | None = None
) -> Build:
    """Returns the build of sums over experts' columns, of experts with so many of them."""
    groups, k = len(sizes), _filled(sizes, sum(sizes))
    arguments = {"m": m, "n": n, "k": k, "sizes": sizes, "run": grouped.RUN, "dtype": "float32"}
    name = f"grouped_sums_{groups}x{m}x{n}x{k}"
    return _build_product(
        Expected("grouped_sums", arguments),
        grouped_sums_kernel,
        (name, tiles or choose_tiles(m, n, k, groups, target), tiles is None),
        {"lhs": 1, "rhs": 1, "out": (groups, m, n)},
        {"starts": Argument((groups + 1,), "int32", meaning=_STARTS)},
        {"RUN": grouped.RUN},
        "of each expert lhs @ rhs.T over its runs of columns, summed in float32",
        target,
    )


def _filled(sizes: tuple[int, ...], rows: int) -> int:
    """Returns the rows in runs of experts with so many of the rows, and of none with the rest."""
    return grouped.RUN * sum(ceil_div(size, grouped.RUN) for size in (*sizes, rows - sum(sizes)))


def _build_product(
    expected: Expected,
    kernel,
    tiled: tuple[str, Tiles, bool],
    shape: dict,
    more: dict[str, Argument],
    constants: dict[str, int],
    result: str,
    target: Target,
) -> Build:
    """Returns the build of a product of packed operands.

    Args:
      tiled: the name without tiles, the tiles, and whether the shape chooses them.
      shape: the batches of lhs and rhs, and the shape of out.
      more, constants: the kernel's arguments after the operands, and those that the dense kernel lacks.
    """
    (name, tiles, chosen), sizes = tiled, expected.arguments
    m, n, k = sizes["m"], sizes["n"], sizes["k"]
    constants = constants_of(m, n, k, tiles, target) | constants
    signature = {}
    for side, rows in (("lhs", m), ("rhs", n)):
        scales = jax.ShapeDtypeStruct((shape[side], rows, k // 32), jnp.uint8)
        scales = jax.eval_shape(functools.partial(shuffle_scales, target=target), scales)
        signature[side] = Argument((shape[side], rows, k // 2), "uint8", meaning=_ELEMENTS)
        meaning = _SHUFFLED if constants["SHUFFLED"] else _SCALES
        signature[f"{side}_scales"] = Argument(scales.shape, "uint8", meaning=meaning)
    out = Argument(shape["out"], sizes["dtype"], "output", result)
    batch = shape["out"][0] if len(shape["out"]) == 3 else 1
    return Build(
        name=name if chosen else f"{name}_tile{tiles.m}x{tiles.n}",
        kernel=kernel,
        signature={**signature, **more, "out": out},
        constants=constants,
        grid=grid_of(m, n, batch, tiles),
        expected=expected._replace(arguments=sizes | {"shuffled": bool(constants["SHUFFLED"])}),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        options=options_of(tiles, target),
    )


_CODE_WORDS = "E2M1, eight a word, element 8 i + j in bits 4 j to 4 j + 3; [1, rows, 4 words a block of 32]"
_CARRIED = "the elements times 2**(scale byte - unit), 0 in place of lost ones"
_GROUPED = "as out with a unit for each GROUP blocks, in programs that lost elements; not used if GROUP is 0"
_GROUP_SCALES = "127 + the unit of a group - that of its row; where grouped is written"
_FAR = "as lost, of lost rows with elements that changed in grouped; not used if GROUP is 0"
_LOST_SUM = "192 times the sum of 2**shift of a row's lost blocks; where grouped is written"
_LOST = "bit i is 1 if a shift changed elements of row i of a program's ROWS rows of BLOCKS blocks"


def _carries(target: Target) -> list[Build]:
    """Returns the carrying of Llama 3.1 8B's operands, and of small ones."""
    tensors = [t for tokens in shapes.TOKENS for t in shapes.tensors(tokens)]
    sizes = {(t.rows, t.columns // BLOCK) for t in tensors} | {(t.columns, t.rows // BLOCK) for t in tensors}
    sizes |= {(1, 1), (33, 3), (1, carry.BLOCKS + 1), (3, 2 * carry.BLOCKS)}
    return [_carry(*size, carrier, target) for size in sorted(sizes) for carrier in CARRIER_DTYPES]


def _carry(n: int, blocks: int, carrier: Carrier, target: Target) -> Build:
    programs = carry.programs_of(n, blocks)
    constants = carry.constants_of(n, blocks, carrier, target, grouped=carrier == "e5m2")
    has_groups = constants["GROUP"] > 0
    grouped, group_scales, far, lost_sum = carry.outputs_of(1, n, blocks, has_groups=has_groups)[3:]
    view = ((1, n, BLOCK * blocks), jnp.dtype(CARRIER_DTYPES[carrier]).name)
    sizes = {"rows": n, "blocks": blocks, "tile": [constants["ROWS"], constants["BLOCKS"]]}
    return Build(
        name=f"carry_{n}x{BLOCK * blocks}_{carrier}",
        kernel=carry.carry_kernel,
        signature={
            "words": Argument((1, n, 4 * blocks), "int32", meaning=_CODE_WORDS),
            "scales": Argument((1, n, blocks), "uint8", meaning="E8M0 bytes"),
            "out": Argument((1, n, 8 * blocks), "int32", "output", _CARRIED, view),
            "unit": Argument((1, n), "uint8", "output", "the scale byte that becomes a factor of 1"),
            "lost": Argument((1, programs), "uint32", "output", _LOST),
            "grouped": Argument(grouped.shape, grouped.dtype.name, "scratch", _GROUPED),
            "group_scales": Argument(group_scales.shape, group_scales.dtype.name, "scratch", _GROUP_SCALES),
            "far": Argument(far.shape, far.dtype.name, "output" if has_groups else "scratch", _FAR),
            "lost_sum": Argument(lost_sum.shape, lost_sum.dtype.name, "scratch", _LOST_SUM),
        },
        constants=constants,
        grid=(programs, 1),
        expected=Expected("carrier", sizes | {"carrier": carrier, "has_groups": has_groups}),
    )


def _correction(shape: shapes.GemmShape, dtype: str, target: Target) -> Build:
    _, m, n, k, batch = shape
    tiles = correct.tiles_of(target)
    parts = carry.rows_and_parts(k // 32)[1]
    constants = correct.constants_of(m, n, k, tiles, has_groups=parts == 1)
    rows = {"lhs": constants["LHS_ROWS"], "rhs": constants["RHS_ROWS"]}
    flags = {side: (batch, ceil_div(size, rows[side]) * parts) for side, size in (("lhs", m), ("rhs", n))}
    groups = k // constants["GROUP"] if constants["GROUP"] else 1
    unit = "scale byte that stands for 1 in each row of the operand's FP8 elements, from 64 to 190"
    lost = (
        "bit i is 1 if row i lost elements in FP8, for each of PARTS parts of each LHS_ROWS or RHS_ROWS rows"
    )
    factors = "2**(unit - 127)"
    in_fp8 = "the operand in FP8, not read for far rows"
    sizes = {"batch": batch, "m": m, "n": n, "k": k, "dtype": dtype}
    result = (
        "lhs @ rhs.T, summed in float32, divided by the factors of its row and column, in each row or column "
        "that lost elements"
    )
    operands = {}
    for side, length in (("lhs", m), ("rhs", n)):
        operands[side] = Argument((batch, length, k // 2), "uint8", meaning=_ELEMENTS)
        operands[f"{side}_scales"] = Argument((batch, length, k // 32), "uint8", meaning=_SCALES)
    return Build(
        name=f"correct_{batch}x{m}x{n}x{k}_{dtype}",
        kernel=correct_kernel,
        signature={
            "before": Argument((batch, m, n), dtype, meaning="the previous content of out, at its address"),
            **operands,
            "lhs_unit": Argument((batch, m), "uint8", meaning=unit),
            "rhs_unit": Argument((batch, n), "uint8", meaning=unit),
            "lhs_lost": Argument(flags["lhs"], "uint32", meaning=lost),
            "rhs_lost": Argument(flags["rhs"], "uint32", meaning=lost),
            "lhs_grouped": Argument((batch, m, k), "float8_e5m2", meaning=in_fp8),
            "lhs_group_scales": Argument(
                (batch, m, groups), "uint8", meaning="127 + exponent of each GROUP columns"
            ),
            "lhs_far": Argument(flags["lhs"], "uint32", meaning="as lhs_lost, if far"),
            "rhs_fp8": Argument((batch, n, k), "float8_e4m3fn", meaning=in_fp8),
            "out": Argument((batch, m, n), dtype, "output", result),
            "lhs_factors": Argument((batch, m), "float32", "output", factors),
            "rhs_factors": Argument((batch, n), "float32", "output", factors),
            "scratch": Argument(
                correct.scratch_of(m, n, batch, tiles),
                "int32",
                "scratch",
                "any content, of no meaning after",
            ),
        },
        constants=constants,
        grid=correct.grid_of(m, n, batch, tiles),
        expected=Expected("correction", sizes | {"rows": rows, "parts": parts, "groups": groups}),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def _sift(shape: shapes.GemmShape, dtype: str) -> Build:
    _, m, n, k, batch = shape
    rows = carry.rows_and_parts(k // 32)[0]
    flags, sifted = ((batch, ceil_div(m, count)) for count in (rows, sift.ROWS))
    constants = sift.constants_of(m, n, jnp.dtype(dtype), E4M3.dtype, rows)
    sizes = {"batch": batch, "m": m, "n": n, "dtype": dtype, "rows": rows, "factor": constants["FACTOR"]}
    still = "bit i is 1 if row i of 32 has one and an element of y is below lost_sum * FACTOR or NaN"
    return Build(
        name=f"sift_{batch}x{m}x{n}_{dtype}_{rows}",
        kernel=sift.sift_kernel,
        signature={
            "y": Argument((batch, m, n), dtype, meaning="the product of two operands in FP8"),
            "lost_sum": Argument((batch, m), "float32", meaning="as from carry_kernel"),
            "lost": Argument(flags, "uint32", meaning="as from carry_kernel, a word for FROM rows"),
            "far": Argument(flags, "uint32", meaning="as lost"),
            "still_lost": Argument(sifted, "uint32", "output", still),
            "still_far": Argument(sifted, "uint32", "output", "as still_lost, of far"),
        },
        constants=constants,
        grid=(sifted[1], batch),
        expected=Expected("sifting", sizes),
        num_warps=sift.WARPS,
    )
