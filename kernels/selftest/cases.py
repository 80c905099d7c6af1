"""The self-test's cases: what each group checks on the current target."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from mxjax.kernels.lowering import PLATFORMS
from mxjax.runtime.devices import Target, current_target

GROUPS = {"kernels": "kernels", "policies": "policies", "training": "training", "gemms": "tune_gemm"}
"""The groups in order, each with its module of this package, which has a function `cases(Settings)`."""


class Settings(NamedTuple):
    """The extent of a self-test.

    Attributes:
      quick: a few small cases of each group, as for a CPU.
      tokens: the GEMMs' tokens.
    """

    target: Target
    quick: bool
    tokens: int


class Case(NamedTuple):
    """One check.

    Attributes:
      run: raises if the check fails, and returns what to report.
      lower: compiles the case's kernels into Triton's cache, which needs no GPU.
    """

    name: str
    run: Callable[[], Mapping[str, Any]]
    lower: Callable[[], object]


def cases_of(group: str, settings: Settings) -> list[Case]:
    """Returns the cases of one of GROUPS."""
    return importlib.import_module(f"mxjax.kernels.selftest.{GROUPS[group]}").cases(settings)


def lower_program(function: Any, *arguments: Any) -> None:
    """Lowers a jitted function for the current target."""
    target = current_target()
    assert target is not None
    function.trace(*arguments).lower(lowering_platforms=(PLATFORMS[target.backend],))


def abstract(*arrays: Any) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of arrays."""
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
