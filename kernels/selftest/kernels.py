"""Every kernel against the definitions: small builds of `mxjax.kernels.cases`, run through JAX.

Results have equal bits, attention's are within a tolerance of a float64 reference. Builds name their inputs,
and the results that numpy and the definitions in `mxjax` give for them.
"""

import functools
import importlib
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.kernels.cases.builds import Build
from mxjax.kernels.cases.check import expected_outputs, make_inputs, output_agrees
from mxjax.kernels.cases.compile import MODULES
from mxjax.kernels.launch import triton_call
from mxjax.kernels.selftest.cases import Case, Settings, lower_program
from mxjax.runtime.devices import INTERPRETER, Target

LARGEST = 2**20  # elements of an array; larger ones are those of Llama's shapes
QUICK = 2**13, 3  # elements of an array, and builds of each kernel


def cases(settings: Settings) -> list[Case]:
    """Returns a case for each small build for the target."""
    found, taken = [], dict[str, int]()
    for build in _builds(settings.target):
        elements = max(math.prod(a.shape) for a in build.signature.values())
        kernel = build.kernel.__name__
        if elements > (QUICK[0] if settings.quick else LARGEST):
            continue
        if settings.quick and taken.get(kernel, 0) == QUICK[1]:
            continue
        taken[kernel] = taken.get(kernel, 0) + 1
        run, lower = functools.partial(run_build, build), functools.partial(lower_build, build)
        found.append(Case(build.name, run, lower))
    return found


def _builds(target: Target) -> list[Build]:
    builds = [
        build
        for module in MODULES
        for build in importlib.import_module(f"mxjax.kernels.cases.{module}").builds(target)
    ]
    if target == INTERPRETER:  # it truncates to bfloat16 where GPUs round, and multiplies its bits
        builds = [b for b in builds if b.expected.kind != "attention"]
        builds = [b for b in builds if "out" not in b.signature or b.expected.arguments["dtype"] == "float32"]
    return builds


def run_build(build: Build) -> Mapping[str, Any]:
    """Runs a build's kernel on its example inputs.

    Raises:
      AssertionError: an output is not what it must be.
    """
    record = _record(build)
    inputs = make_inputs(record)
    wanted = expected_outputs(record, inputs)
    results = _program(build)(*(jnp.asarray(inputs[name]) for name in inputs))
    outputs = [name for name, a in build.signature.items() if a.role != "input"]
    for name, result in zip(outputs, results, strict=True):
        if build.signature[name].role == "output":
            memory = np.asarray(result).tobytes()
            assert output_agrees(record, name, memory, wanted[name]), f"{name} is not what is defined"
    return {}


def lower_build(build: Build) -> None:
    """Compiles a build's kernel as a program's lowering does."""
    arrays = [a for a in build.signature.values() if a.role == "input"]
    lower_program(_program(build), *(jax.ShapeDtypeStruct(a.shape, jnp.dtype(a.dtype)) for a in arrays))


def _program(build: Build) -> Any:
    out = [
        jax.ShapeDtypeStruct(a.shape, jnp.dtype(a.dtype))
        for a in build.signature.values()
        if a.role != "input"
    ]
    call = functools.partial(
        triton_call,
        build.kernel,
        out=out,
        grid=build.grid,
        num_warps=build.num_warps,
        num_stages=build.num_stages,
        options=build.options,
        in_place=next(iter(build.signature)) == "before",  # where the first result takes its memory
        **build.constants,
    )
    return jax.jit(call)


def _record(build: Build) -> Mapping[str, Any]:
    """Returns the arguments and expected results of a build, as `mxjax.kernels.cases.check` reads them."""
    arguments = []
    for name, a in build.signature.items():
        shape, dtype = a.view or (a.shape, a.dtype)
        view = {"shape": shape, "dtype": jnp.dtype(dtype)}
        arguments.append({"name": name, "role": a.role, "view": view, "same_as": a.same_as})
    return {"arguments": arguments, "expected": build.expected._asdict()}
