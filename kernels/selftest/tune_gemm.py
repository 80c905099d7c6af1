"""Time of the FP4 GEMM with every candidate tile at Llama 3.1 8B's shapes, and the tile table.

    python -m mxjax.kernels.selftest.tune_gemm [--tokens 8192] [--gemms mlp.down.fprop …] [--table FILE]

Every result is checked bit for bit, five times, before its case is timed. The operands are such that float32
holds every partial sum in any order, as in `mxjax.kernels.cases.expected.gemm_inputs`. So all results of the
kernel have the bits of XLA's bfloat16 GEMM. The ceilings are `jnp.dot` of the same values in bfloat16 and in
FP8, by cuBLAS or hipBLASLt. The fastest candidate of each GEMM goes into the table from which the library
then chooses (`mxjax.kernels.matmul.tiles`). Prints one table a GEMM, and JSON as the last line. `python -m
mxjax.kernels.selftest` does the same in its group "gemms", and survives a kernel that crashes.
"""

import argparse
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mxjax.kernels.cases.shapes import GemmShape, gemms
from mxjax.kernels.lowering import PLATFORMS
from mxjax.kernels.matmul import aiter
from mxjax.kernels.matmul.fp4_gemm import launch
from mxjax.kernels.matmul.tiles import AITER, VARIABLE, TileName, Tiles, candidates, default_path, write_table
from mxjax.kernels.selftest import cases as selftest
from mxjax.kernels.selftest.measured import Case, Checked, Report, add_arguments, measure, time_cases
from mxjax.numerics.formats import BLOCK
from mxjax.operands.kernel_operand import KernelOperand, decode
from mxjax.operands.product import contract
from mxjax.runtime.devices import INTERPRETER, Target, current_target

REPEATS = 5  # runs whose results are compared, since a race shows in some only
LARGEST_FP8_ERROR = 1e-2  # the norm of the difference over the norm
BASELINES = ("jnp.dot, bfloat16", "jnp.dot, FP8")
AITER_GEMM = "AITER"
ROUNDS = 10  # of a case of the self-test
QUICK = GemmShape("quick", 64, 64, 256)
_XLA = {"xla_gpu_enable_triton_gemm": False}  # XLA's GEMMs are those of cuBLAS and hipBLASLt


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the GEMMs that the command line names; exits with 1 if a candidate failed."""
    module = "mxjax.kernels.selftest.tune_gemm"
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=__doc__)
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192])
    names = [shape.name for shape in gemms(1)]
    parser.add_argument("--gemms", nargs="+", default=names, choices=names, metavar="GEMM")
    parser.add_argument("--table", type=Path, help="file of the tile table; default: the user's cache")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    target = current_target()
    if target is None:
        raise SystemExit("tune_gemm needs a GPU and Triton: install mxjax[cuda] or mxjax[rocm]")
    report = Report(module, arguments, options)
    records = []
    for shape in (shape for tokens in options.tokens for shape in gemms(tokens)):
        if shape.name in options.gemms:
            title = f"{shape.name}: [{shape.m}, {shape.k}] @ [{shape.k}, {shape.n}]"
            records += time_cases(report, title, "FLOP", map(measured, gemm_cases([shape], target)))
    path = options.table or (default_path(target.arch) if target != INTERPRETER else None)
    if path is not None and save_table(path, target, report.content, records):
        print(f"\ntile table: {path} (the library reads it; set {VARIABLE}= to do without)")
    report.print()


class GemmCase(NamedTuple):
    """A GEMM by one of `BASELINES`, by AMD's, or by our kernel with these tiles."""

    shape: GemmShape
    by: str | Tiles

    @property
    def tile(self) -> TileName | None:
        """The name by which a table knows what ran, or None for a baseline."""
        if isinstance(self.by, Tiles):
            return self.by.name
        return AITER if self.by == AITER_GEMM else None

    @property
    def name(self) -> str:
        """The GEMM and how it runs."""
        if isinstance(self.by, str):
            return f"{self.shape.name}, {self.by}"
        m, n, k, warps, stages = self.by.name
        return f"{self.shape.name}, {m}x{n}x{k}, {warps} warps, {stages} stages"


def gemm_cases(shapes: Sequence[GemmShape], target: Target) -> Iterator[GemmCase]:
    """Yields the baselines and the candidates that fit for each GEMM."""
    for shape in shapes:
        for baseline in BASELINES:
            yield GemmCase(shape, baseline)
        for tiles in candidates(target):
            if tiles.fits(shape.m, shape.n, shape.k):
                yield GemmCase(shape, tiles)
        if dtype_of(shape) == jnp.bfloat16 and aiter.takes(*shape[1:]) and aiter.is_available(target):
            yield GemmCase(shape, AITER_GEMM)


def measured(case: GemmCase) -> Case:
    """Returns a case for `time_cases`; `save_table` reads its record."""
    shape, ours = case.shape, isinstance(case.by, Tiles)
    fields = {
        "of": shape.name,
        "gemm": [shape.m, shape.n, shape.k, shape.batch],
        "by": "mxjax" if ours else case.by,
        "tile": list(case.tile) if case.tile else None,
    }
    work = 2.0 * shape.m * shape.n * shape.k * shape.batch
    return Case(case.name, functools.partial(check, case), work, ours, case.by in BASELINES, fields)


def check(case: GemmCase) -> Checked:
    """Checks a case's results.

    Raises:
      AssertionError: a result has other bits than it must have.
    """
    operands, wanted = _tensors(case.shape)
    values = operands if case.tile else _decoded(case.shape, str(case.by))
    run = functools.partial(_program(case.by, case.shape), *values)
    error = 0.0
    if case.by in (BASELINES[1], AITER_GEMM):  # may accumulate in fewer bits than float32 has
        error = float(_distance(run(), wanted))
        assert error < LARGEST_FP8_ERROR, f"differs from the bfloat16 GEMM by {error:.2g}"
    for i in range(REPEATS if isinstance(case.by, Tiles) else 0):
        wrong = int(_count_different(run(), wanted))
        assert not wrong, f"{wrong} of {wanted.size} elements are wrong in run {i + 1} of {REPEATS}"
    return Checked(run, error)


def cases(settings: selftest.Settings) -> list[selftest.Case]:
    """Returns the self-test's cases: each baseline and candidate of each GEMM."""
    shapes = [QUICK] if settings.quick else gemms(settings.tokens)
    return [
        selftest.Case(case.name, functools.partial(_run, case, settings), functools.partial(_lower, case))
        for case in gemm_cases(shapes, settings.target)
    ]


def _run(case: GemmCase, settings: selftest.Settings) -> Mapping[str, Any]:
    checked = check(case)
    timing = measure(checked.run, rounds=1 if settings.quick else ROUNDS)
    record = measured(case).record(timing, checked.error)
    return record | {"TFLOP/s": round(record["work"] / timing.median / 1e12, 1)}


def _lower(case: GemmCase) -> None:
    target = current_target()
    if case.tile and target is not None:
        operands = jax.eval_shape(functools.partial(_draw, case.shape))
        traced = _program(case.by, case.shape).trace(*operands)
        traced.lower(lowering_platforms=(PLATFORMS[target.backend],))


def save_table(
    path: Path, target: Target, about: Mapping[str, Any], records: Iterable[Mapping[str, Any]]
) -> bool:
    """Writes the fastest candidate of each GEMM to a tile table, if there is any; returns whether it did."""
    fastest: dict[tuple[int, ...], Mapping[str, Any]] = {}
    for record in records:
        gemm = tuple(record["gemm"])
        if record["tile"] and (gemm not in fastest or record["median"] < fastest[gemm]["median"]):
            fastest[gemm] = record
    kept = {name: value for name, value in about.items() if name in ("device", "jax", "packages", "commit")}
    entries = [
        {"gemm": r["gemm"], "tile": r["tile"], "name": r["of"], "seconds": r["median"]}
        for r in fastest.values()
    ]
    if entries:
        write_table(path, target.arch, kept, entries)
    return bool(entries)


def dtype_of(shape: GemmShape) -> Any:
    """Returns the result's dtype: Wgrad's is float32, as its weights are."""
    return jnp.float32 if shape.name.endswith("wgrad") else jnp.bfloat16


def _program(by: str | Tiles, shape: GemmShape) -> Any:
    dtype = dtype_of(shape)
    if isinstance(by, Tiles) or by == AITER_GEMM:
        tiles = by if isinstance(by, Tiles) else AITER
        return jax.jit(lambda *operands: launch(*operands, jnp.dtype(dtype), current_target(), tiles))
    options = _XLA if jax.default_backend() == "gpu" else {}
    return jax.jit(lambda x, y: contract(x, -1, y, -1, None, dtype), compiler_options=options)


def _draw(shape: GemmShape) -> list[jax.Array]:
    """Returns packed elements and scale bytes from 126 to 128 of both operands."""
    arrays = []
    for side, rows in enumerate((shape.m, shape.n)):
        keys = jax.random.split(jax.random.key(side))
        arrays.append(jax.random.bits(keys[0], (shape.batch, rows, shape.k // 2), jnp.uint8))
        scales = jax.random.randint(keys[1], (shape.batch, rows, shape.k // BLOCK), 126, 129)
        arrays.append(scales.astype(jnp.uint8))
    return arrays


@functools.lru_cache(1)
def _tensors(shape: GemmShape) -> tuple[list[jax.Array], jax.Array]:
    operands = jax.jit(functools.partial(_draw, shape))()
    return operands, _program(BASELINES[0], shape)(*_decoded_from(operands, jnp.bfloat16))


def _decoded(shape: GemmShape, baseline: str) -> list[jax.Array]:
    """Returns the operands' values in a baseline's dtype, which represents them exactly."""
    dtype = jnp.bfloat16 if baseline == BASELINES[0] else jnp.float8_e4m3fn
    values = _decoded_from(_tensors(shape)[0], dtype)
    return values if shape.batch > 1 else [x[0] for x in values]  # FP8 GEMMs have no batch axis


@functools.partial(jax.jit, static_argnums=1)
def _decoded_from(operands: Sequence[jax.Array], dtype) -> list[jax.Array]:
    lhs, lhs_scales, rhs, rhs_scales = operands
    return [decode(KernelOperand(*q)).astype(dtype) for q in ((lhs, lhs_scales), (rhs, rhs_scales))]


_count_different: Callable[[jax.Array, jax.Array], jax.Array] = jax.jit(
    lambda got, wanted: jnp.sum(got.reshape(wanted.shape) != wanted)
)


@jax.jit
def _distance(got: jax.Array, wanted: jax.Array) -> jax.Array:
    got, wanted = (x.astype(jnp.float32) for x in (got.reshape(wanted.shape), wanted))
    return jnp.linalg.norm((got - wanted).ravel()) / jnp.linalg.norm(wanted.ravel())


if __name__ == "__main__":
    main()
