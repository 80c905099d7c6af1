"""The ahead-of-time builds of the FP4 GEMM and of kernels that carry operands in FP8 or correct products."""

import dataclasses
import functools

import jax

from mxjax.kernels.cases import shapes
from mxjax.kernels.cases.builds import Build, Expected, build_of
from mxjax.kernels.launch import Call, calls_of, ceil_div
from mxjax.kernels.matmul import carry, grouped
from mxjax.kernels.matmul.fp4_gemm import constants_of, grid_of, launch, shuffle_scales
from mxjax.kernels.matmul.fp8_matmul import correct
from mxjax.kernels.matmul.grouped_kernel import grouped_rows_kernel, grouped_sums_kernel
from mxjax.kernels.matmul.tiles import MORE_TILES, TILES, Tiles, choose_tiles, options_of, table_of
from mxjax.numerics.formats import BLOCK
from mxjax.operands.carriers import CARRIER_DTYPES, Carrier
from mxjax.runtime.devices import Target


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
        wanted += [build for size in sizes for build in _corrections(*size, target)]
        wanted += _carries(target)
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
    chosen = tiles or choose_tiles(m, n, k, batch, target)
    multiply = functools.partial(launch, dtype=jax.numpy.dtype(dtype), target=target, tiles=chosen)
    [call] = calls_of(multiply, *_packed(batch, m, k), *_packed(batch, n, k))
    sizes = {"batch": batch, "m": m, "n": n, "k": k, "dtype": dtype}
    return _build_product(f"gemm_{batch}x{m}x{n}x{k}_{dtype}", call, Expected("gemm", sizes), tiles)


def _packed(batch: int, rows: int, k: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    elements, scales = (jax.ShapeDtypeStruct((batch, rows, n), "uint8") for n in (k // 2, k // BLOCK))
    return elements, scales


def _build_product(name: str, call: Call, expected: Expected, tiles: Tiles | None) -> Build:
    """Returns the build of a product of packed operands; tiles that its shape does not choose are named."""
    arguments = expected.arguments | {"shuffled": bool(call.constants["SHUFFLED"])}
    name = name if tiles is None else f"{name}_tile{tiles.m}x{tiles.n}"
    return build_of(name, call, expected._replace(arguments=arguments))


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


def _grouped_rows(
    sizes: tuple[int, ...], rows: int, n: int, k: int, target: Target, tiles: Tiles | None = None
) -> Build:
    """Returns the build of rows times their experts' matrices, of experts with so many of the rows."""
    groups, m = len(sizes), _filled(sizes, rows)
    chosen = tiles or choose_tiles(m, n, k, 1, target)
    places = [jax.ShapeDtypeStruct((size,), "int32") for size in (m // grouped.RUN, groups + 1, groups + 2)]
    constants = constants_of(m, n, k, chosen, target) | {"GROUPS": groups, "RUN": grouped.RUN}
    rest = (rows, n), grid_of(m, n, 1, chosen), "bfloat16", chosen, constants
    call = _grouped_call(grouped_rows_kernel, ((1, m), (groups, n)), k, places, rest, target)
    arguments = {"m": m, "n": n, "k": k, "sizes": sizes, "rows": rows, "run": grouped.RUN}
    expected = Expected("grouped_rows", arguments | {"dtype": "bfloat16"})
    return _build_product(f"grouped_rows_{groups}x{rows}x{n}x{k}", call, expected, tiles)


def _grouped_sums(
    sizes: tuple[int, ...], m: int, n: int, target: Target, tiles: Tiles | None = None
) -> Build:
    """Returns the build of sums over experts' columns, of experts with so many of them."""
    groups, k = len(sizes), _filled(sizes, sum(sizes))
    chosen = tiles or choose_tiles(m, n, k, groups, target)
    constants = constants_of(m, n, k, chosen, target) | {"RUN": grouped.RUN}
    rest = (groups, m, n), grid_of(m, n, groups, chosen), "float32", chosen, constants
    starts = [jax.ShapeDtypeStruct((groups + 1,), "int32")]
    call = _grouped_call(grouped_sums_kernel, ((1, m), (1, n)), k, starts, rest, target)
    arguments = {"m": m, "n": n, "k": k, "sizes": sizes, "run": grouped.RUN, "dtype": "float32"}
    return _build_product(
        f"grouped_sums_{groups}x{m}x{n}x{k}", call, Expected("grouped_sums", arguments), tiles
    )


def _grouped_call(kernel, sides, k: int, places: list, rest: tuple, target: Target) -> Call:
    """Returns the call of a grouped kernel with given tiles."""

    def multiply(lhs, lhs_scales, rhs, rhs_scales, *places):
        scales = [shuffle_scales(x, target) for x in (lhs_scales, rhs_scales)]
        arrays = (lhs, scales[0], rhs, scales[1], *places)
        return grouped._launch(kernel, arrays, *rest, options_of(rest[3], target))

    operands = [x for side in sides for x in _packed(*side, k)]
    [call] = calls_of(multiply, *operands, *places)
    return call


def _filled(sizes: tuple[int, ...], rows: int) -> int:
    """Returns the rows in runs of experts with so many of the rows, and of none with the rest."""
    return grouped.RUN * sum(ceil_div(size, grouped.RUN) for size in (*sizes, rows - sum(sizes)))


def _carries(target: Target) -> list[Build]:
    """Returns the carrying of Llama 3.1 8B's operands, and of small ones."""
    tensors = [t for tokens in shapes.TOKENS for t in shapes.tensors(tokens)]
    sizes = {(t.rows, t.columns // BLOCK) for t in tensors} | {(t.columns, t.rows // BLOCK) for t in tensors}
    sizes |= {(1, 1), (33, 3), (1, carry.BLOCKS + 1), (3, 2 * carry.BLOCKS)}
    return [_carry(*size, carrier, target) for size in sorted(sizes) for carrier in CARRIER_DTYPES]


def _carry(n: int, blocks: int, carrier: Carrier, target: Target) -> Build:
    run = functools.partial(carry.carry_operand, carrier=carrier, target=target, grouped=carrier == "e5m2")
    [call] = calls_of(run, *_packed(1, n, BLOCK * blocks))
    has_groups = call.constants["GROUP"] > 0
    sizes = {"rows": n, "blocks": blocks, "tile": [call.constants["ROWS"], call.constants["BLOCKS"]]}
    return build_of(
        f"carry_{n}x{BLOCK * blocks}_{carrier}",
        call,
        Expected("carrier", sizes | {"carrier": carrier, "has_groups": has_groups}),
        {"out": CARRIER_DTYPES[carrier]},
        () if has_groups else ("grouped", "group_scales", "far", "lost_sum"),
    )


def _corrections(shape: shapes.GemmShape, dtype: str, target: Target) -> list[Build]:
    """Returns the builds of a product's correction, and of the sifting before it if that takes whole rows."""
    _, m, n, k, batch = shape
    y, sides = jax.ShapeDtypeStruct((batch, m, n), dtype), (_packed(batch, m, k), _packed(batch, n, k))

    def run(y, lhs, lhs_scales, rhs, rhs_scales):
        left = carry.carry_operand(lhs, lhs_scales, "e5m2", target, grouped=True)
        right = carry.carry_operand(rhs, rhs_scales, "e4m3", target)
        return correct(y, (lhs, lhs_scales, rhs, rhs_scales), left, right, target)

    *sifts, call = calls_of(run, y, *sides[0], *sides[1])[2:]
    constants = call.constants
    rows = {"lhs": constants["LHS_ROWS"], "rhs": constants["RHS_ROWS"]}
    sizes = {"batch": batch, "m": m, "n": n, "k": k, "dtype": dtype}
    groups = k // constants["GROUP"] if constants["GROUP"] else 1
    expected = Expected("correction", sizes | {"rows": rows, "parts": constants["PARTS"], "groups": groups})
    found = [build_of(f"correct_{batch}x{m}x{n}x{k}_{dtype}", call, expected)]
    for sift in sifts:
        of_word, factor = sift.constants["FROM"], sift.constants["FACTOR"]
        sizes = {"batch": batch, "m": m, "n": n, "dtype": dtype, "rows": of_word, "factor": factor}
        found.append(build_of(f"sift_{batch}x{m}x{n}_{dtype}_{of_word}", sift, Expected("sifting", sizes)))
    return found
