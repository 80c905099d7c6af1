"""The ahead-of-time builds of the GEMM kernel."""

import functools

import jax
import jax.numpy as jnp

from mxjax.kernels import references, shapes
from mxjax.kernels.builds import Argument, Build
from mxjax.kernels.gemm import constants_of, gemm_kernel, grid_of, shuffle_scales
from mxjax.kernels.gemm_tiles import OPTIONS, TILES, Tiles, choose_tiles, table_of
from mxjax.kernels.launch import Target

_ELEMENTS = "E2M1, two a byte along k, element 2 i in the low nibble; [batch, rows, k / 2]"
_SCALES = "E8M0 bytes, 2**(byte - 127), 255 is NaN; [batch, rows, k / 32]"
_SHUFFLED = (
    "E8M0 bytes, 2**(byte - 127), 255 is NaN: of [batch, rows, k / 32], filled up with 127 to multiples of "
    "256 rows and of 8 blocks, each 32 rows and 8 blocks are ordered [4, 16, 2, 2] from [2, 16 rows, 2, 4 "
    "blocks], whose axes become 3, 1, 2, 0; [batch, blocks / 8, rows * 8]"
)


def builds(target: Target) -> list[Build]:
    """Returns the builds of Llama 3.1 8B's GEMMs and of small ones, each tile size of the target among them.

    The result is float32 in Wgrad, whose weights are, and else bfloat16.
    """
    wanted = [
        _build(shape, "float32" if shape.name.endswith("wgrad") else "bfloat16", target)
        for tokens in shapes.TOKENS
        for shape in shapes.gemms(tokens)
    ]
    wanted += [
        _build(shape, dtype, target) for shape in shapes.EDGE_GEMMS for dtype in ("bfloat16", "float32")
    ]
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
        reference=references.gemm(batch, m, n, k, dtype, bool(constants["SHUFFLED"])),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        options=OPTIONS.get(table_of(target), {}),
    )
