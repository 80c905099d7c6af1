"""The cases of `bench_gemm`: every candidate tile of the FP4 GEMM, and XLA's GEMMs of the same values.

The operands are such that float32 holds every partial sum in any order, as in `aot.expected.gemm_inputs`. So
all results of the kernel have the same bits, those of XLA's bfloat16 GEMM.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mxjax.devices import Target, current_target
from mxjax.formats import BLOCK
from mxjax.kernels.bench.timing import Timing, measure
from mxjax.kernels.lowering import PLATFORMS
from mxjax.kernels.matmul.fp4_gemm import launch
from mxjax.kernels.matmul.tiles import Tiles, candidates
from mxjax.kernels.shapes import GemmShape
from mxjax.kmajor import KMajor, decode
from mxjax.product import contract

REPEATS = 5  # runs whose results are compared, since a race shows in some only
LARGEST_FP8_ERROR = 1e-2  # the norm of the difference over the norm
BASELINES = ("jnp.dot, bfloat16", "jnp.dot, FP8")
_XLA = {"xla_gpu_enable_triton_gemm": False}  # XLA's GEMMs are those of cuBLAS and hipBLASLt


class GemmCase(NamedTuple):
    """A GEMM by one of `BASELINES`, or by our kernel with these tiles."""

    shape: GemmShape
    by: str | Tiles

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


def run_case(case: GemmCase, rounds: int) -> Timing:
    """Checks a case's results and times it.

    Raises:
      AssertionError: a result has other bits than it must have.
    """
    operands, wanted = _tensors(case.shape)
    run = _program(case.by, case.shape)
    values = operands if isinstance(case.by, Tiles) else _decoded(case.shape, case.by)
    if case.by == BASELINES[1]:  # may accumulate in fewer bits than float32 has
        error = float(_distance(run(*values), wanted))
        assert error < LARGEST_FP8_ERROR, f"differs from the bfloat16 GEMM by {error:.2g}"
    for i in range(REPEATS if isinstance(case.by, Tiles) else 0):
        wrong = int(_count_different(run(*values), wanted))
        assert not wrong, f"{wrong} of {wanted.size} elements are wrong in run {i + 1} of {REPEATS}"
    return measure(run, *values, rounds=rounds)


def lower_case(case: GemmCase) -> None:
    """Compiles a case's kernel into Triton's cache, without a GPU."""
    target = current_target()
    if isinstance(case.by, Tiles) and target is not None:
        operands = jax.eval_shape(functools.partial(_draw, case.shape))
        traced = _program(case.by, case.shape).trace(*operands)
        traced.lower(lowering_platforms=(PLATFORMS[target.backend],))


def dtype_of(shape: GemmShape) -> Any:
    """Returns the result's dtype: Wgrad's is float32, as its weights are."""
    return jnp.float32 if shape.name.endswith("wgrad") else jnp.bfloat16


def _program(by: str | Tiles, shape: GemmShape) -> Any:
    dtype = dtype_of(shape)
    if isinstance(by, Tiles):
        return jax.jit(lambda *operands: launch(*operands, jnp.dtype(dtype), current_target(), by))
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
    """Returns the operands and the product."""
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
    return [decode(KMajor(*q)).astype(dtype) for q in ((lhs, lhs_scales), (rhs, rhs_scales))]


_count_different: Callable[[jax.Array, jax.Array], jax.Array] = jax.jit(
    lambda got, wanted: jnp.sum(got.reshape(wanted.shape) != wanted)
)


@jax.jit
def _distance(got: jax.Array, wanted: jax.Array) -> jax.Array:
    got, wanted = (x.astype(jnp.float32) for x in (got.reshape(wanted.shape), wanted))
    return jnp.linalg.norm((got - wanted).ravel()) / jnp.linalg.norm(wanted.ravel())
