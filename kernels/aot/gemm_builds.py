"""The ahead-of-time builds of the GEMM kernel, and of the one that puts FP8 products right."""

import functools

import jax
import jax.numpy as jnp

from mxjax.devices import Target
from mxjax.kernels import shapes
from mxjax.kernels.aot import expected
from mxjax.kernels.aot.builds import Argument, Build
from mxjax.kernels.matmul import fp8_matmul
from mxjax.kernels.matmul.carry import programs_of
from mxjax.kernels.matmul.fp4_gemm import constants_of, gemm_kernel, grid_of, shuffle_scales
from mxjax.kernels.matmul.tiles import OPTIONS, TILES, Tiles, choose_tiles, table_of

_ELEMENTS = "E2M1, two a byte along k, element 2 i in the low nibble; [batch, rows, k / 2]"
_SCALES = "E8M0 bytes, 2**(byte - 127), 255 is NaN; [batch, rows, k / 32]"
_SHUFFLED = (
    "E8M0 bytes, 2**(byte - 127), 255 is NaN: of [batch, rows, k / 32], filled up with 127 to multiples of "
    "256 rows and of 8 blocks, each 32 rows and 8 blocks are ordered [4, 16, 2, 2] from [2, 16 rows, 2, 4 "
    "blocks], whose axes become 3, 1, 2, 0; [batch, blocks / 8, rows * 8]"
)


def builds(target: Target) -> list[Build]:
    """Returns the builds of Llama 3.1 8B's GEMMs and of small ones, each tile size of the target among them.

    The result is float32 in Wgrad, whose weights are, and else bfloat16. Targets that multiply FP8 and not
    FP4 have the correction of each.
    """
    sizes = [
        (shape, "float32" if shape.name.endswith("wgrad") else "bfloat16")
        for tokens in shapes.TOKENS
        for shape in shapes.gemms(tokens)
    ]
    sizes += [(shape, dtype) for shape in shapes.EDGE_GEMMS for dtype in ("bfloat16", "float32")]
    wanted = [_build(*size, target) for size in sizes]
    if target.arch == "sm_90":
        wanted += [_correction(*size, target) for size in sizes]
    wanted += [_build(_small(tiles), "bfloat16", target, tiles) for tiles in TILES[table_of(target)]]
    return list({build.name: build for build in wanted}.values())


def _small(tiles: Tiles) -> shapes.GemmShape:
    """Returns a shape of few programs of these tiles: with remainders unless they must be exact."""
    rest = 0 if tiles.exact else 1
    return shapes.GemmShape("small", tiles.m + rest, tiles.n + 3 * rest, 2 * tiles.k + 32 * rest, batch=2)


def _build(shape: shapes.GemmShape, dtype: str, target: Target, tiles: Tiles | None = None) -> Build:
    _, m, n, k, batch = shape
    name = f"gemm_{batch}x{m}x{n}x{k}_{dtype}" + (f"_tile{tiles.m}x{tiles.n}" if tiles else "")
    tiles = tiles or choose_tiles(m, n, k, batch, target)
    shuffle = functools.partial(shuffle_scales, target=target)
    x_scales, y_scales = (
        jax.eval_shape(shuffle, jax.ShapeDtypeStruct((batch, rows, k // 32), jnp.uint8)) for rows in (m, n)
    )
    constants = constants_of(m, n, k, tiles, target)
    scales = _SHUFFLED if constants["SHUFFLED"] else _SCALES
    return Build(
        name=name,
        kernel=gemm_kernel,
        signature={
            "lhs": Argument((batch, m, k // 2), "uint8", meaning=_ELEMENTS),
            "lhs_scales": Argument(x_scales.shape, "uint8", meaning=scales),
            "rhs": Argument((batch, n, k // 2), "uint8", meaning=_ELEMENTS),
            "rhs_scales": Argument(y_scales.shape, "uint8", meaning=scales),
            "out": Argument((batch, m, n), dtype, True, "lhs @ rhs.T, summed in float32"),
        },
        constants=constants,
        grid=grid_of(m, n, batch, tiles),
        reference=expected.gemm(batch, m, n, k, dtype, bool(constants["SHUFFLED"])),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        options=OPTIONS.get(table_of(target), {}),
    )


def _correction(shape: shapes.GemmShape, dtype: str, target: Target) -> Build:
    _, m, n, k, batch = shape
    tiles = fp8_matmul.tiles_of(target)
    left, right = programs_of(m, k // 32), programs_of(n, k // 32)
    constants = fp8_matmul.constants_of(m, n, k, tiles)
    reference = "the scale byte that stands for 1 in each row of the operand's FP8 elements, from 64 to 190"
    lost = "of each of PARTS parts of each ROWS rows, 1 if elements of the operand were lost in FP8"
    factors = "2**(reference - 127)"
    return Build(
        name=f"correct_{batch}x{m}x{n}x{k}_{dtype}",
        kernel=fp8_matmul.correct_kernel,
        signature={
            "before": Argument((batch, m, n), dtype, meaning="what is in the memory of out: its address"),
            "lhs": Argument((batch, m, k // 2), "uint8", meaning=_ELEMENTS),
            "lhs_scales": Argument((batch, m, k // 32), "uint8", meaning=_SCALES),
            "rhs": Argument((batch, n, k // 2), "uint8", meaning=_ELEMENTS),
            "rhs_scales": Argument((batch, n, k // 32), "uint8", meaning=_SCALES),
            "lhs_reference": Argument((batch, m), "uint8", meaning=reference),
            "rhs_reference": Argument((batch, n), "uint8", meaning=reference),
            "lhs_lost": Argument((batch, left), "uint8", meaning=lost),
            "rhs_lost": Argument((batch, right), "uint8", meaning=lost),
            "out": Argument(
                (batch, m, n),
                dtype,
                True,
                "lhs @ rhs.T, summed in float32, divided by the factors of its row and column, in each strip "
                "of BLOCK_M rows or BLOCK_N columns that has a flag set",
            ),
            "lhs_factors": Argument((batch, m), "float32", True, factors),
            "rhs_factors": Argument((batch, n), "float32", True, factors),
        },
        constants=constants,
        grid=fp8_matmul.grid_of(m, n, batch, tiles),
        reference=expected.correction(batch, m, n, k, dtype, constants),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
