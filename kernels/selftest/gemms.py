"""The FP4 GEMM with every candidate tile at Llama's shapes, checked and timed as `bench_gemm` does."""

import functools
from collections.abc import Mapping
from typing import Any

from mxjax.kernels.bench.bench_gemm import record_of, teraflops
from mxjax.kernels.bench.gemm_cases import GemmCase, gemm_cases, lower_case, run_case
from mxjax.kernels.selftest.cases import Case, Settings
from mxjax.kernels.shapes import GemmShape, gemms

ROUNDS = 10
QUICK = GemmShape("quick", 64, 64, 256)


def cases(settings: Settings) -> list[Case]:
    """Returns a case for each baseline and candidate of each GEMM."""
    shapes = [QUICK] if settings.quick else gemms(settings.tokens)
    return [
        Case(case.name, functools.partial(time, case, settings), functools.partial(lower_case, case))
        for case in gemm_cases(shapes, settings.target)
    ]


def time(case: GemmCase, settings: Settings) -> Mapping[str, Any]:
    """Checks and times a case; the result is a record of `bench_gemm`, with the rate."""
    record = record_of(case, run_case(case, 1 if settings.quick else ROUNDS))
    return record | {"TFLOP/s": round(teraflops(record), 1)}
