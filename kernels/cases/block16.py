"""The ahead-of-time builds of the quantizer of blocks of 16: its calls for tensors of published recipes."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend

from mxjax.kernels.cases.builds import Argument, Build, Expected
from mxjax.kernels.cases.expected_block16 import uses_of_tensor
from mxjax.kernels.quantize.block16 import quantize_block16
from mxjax.kernels.quantize.block16_kernel import largest_kernel
from mxjax.runtime.devices import Target, use_target

LARGE, SMALL = (8192, 4096), (65, 97)
RECIPES = {
    "nvfp4": (LARGE, SMALL),
    "four_over_six": (SMALL,),
    "quartet2": (SMALL,),
    "ue5m3": (SMALL,),
    "tetrajet_v2": (SMALL,),
}
TENSORS = {"activation": "bfloat16", "gradient": "bfloat16", "weight": "float32"}

_MEANINGS = {
    "x": "the tensor, row-major",
    "scalars": "words of keys and signs, as `mxjax.kernels.quantize.block16_kernel` says",
    "maxima": "bits of the largest magnitudes that the two sides quantize",
    "before": "not read",
    "row_units": "the tensor scale, or those of runs",
    "column_units": "the tensor scale, or those of runs",
    "plain": "bits of each tile's largest magnitude",
    "rotated": "as plain, after the rotation",
    "row_words": "values without the tensor scale, K-major",
    "column_words": "values without the tensor scale, K-major",
}


@functools.cache
def builds(target: Target) -> list[Build]:
    """Returns the builds, none on HIP, where XLA quantizes."""
    if target.backend != "cuda":
        return []
    found = {}
    for recipe, shapes in RECIPES.items():
        for tensor in TENSORS:
            for shape in shapes:
                for build in _builds(recipe, tensor, shape, target):
                    # Recipes share kernels.
                    key = (build.kernel, build.signature["x"].dtype, str(build.constants))
                    found.setdefault(key, build)
    return list(found.values())


def _builds(recipe: str, tensor: str, shape: tuple[int, int], target: Target) -> Iterator[Build]:
    x = jax.ShapeDtypeStruct(shape, TENSORS[tensor])
    with use_target(target):
        traced = jax.make_jaxpr(lambda x: quantize_block16(x, uses_of_tensor(recipe, tensor)))(x)
    about = {"shape": [*shape], "dtype": x.dtype.name, "recipe": recipe, "tensor": tensor}
    for i, call in enumerate(_calls(traced.jaxpr)):
        constants = {name: value for name, _, value in call.params["constants"]}
        sizes = iter(call.params["sizes"])
        names = call.params["kernel"].arg_names
        arrays = [v.aval for v in (*call.invars, *call.outvars)]
        constants = {
            name: next(sizes) if isinstance(constants[name], tuple) else constants[name]
            for name in names[len(arrays) :]
        }
        about["draws"] = arrays[names.index("scalars")].dtype == "uint32"
        options = {name: value for name, _, value in call.params["options"]}
        yield Build(
            name=f"block16_{shape[0]}x{shape[1]}_{recipe}_{tensor}_{i}",
            kernel=call.params["kernel"],
            signature=_signature(names, arrays, len(call.invars), constants),
            constants=constants,
            grid=call.params["grid"],
            expected=_expected(call.params["kernel"], constants, about),
            num_warps=options["num_warps"],
        )


def _calls(jaxpr: Any) -> Iterator[Any]:
    """Yields the kernel calls of a program and of the functions that it calls."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "mxjax_kernel_call":
            yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from _calls(inner)


def _signature(names, arrays, n_inputs: int, constants: dict[str, Any]) -> dict[str, Argument]:
    found = {}
    for i, (name, array) in enumerate(zip(names, arrays, strict=False)):
        role, view = "input" if i < n_inputs else "output", None
        if not _is_wanted(name, constants):
            role = "unused"
        if name.endswith("words") and role == "output":
            view = (*array.shape[:-1], 2 * array.shape[-1]), "bfloat16"
        found[name] = Argument(array.shape, array.dtype.name, role, _MEANINGS[name], view)
    return found


def _is_wanted(name: str, constants: dict[str, Any]) -> bool:
    match name:
        case "plain":
            return constants["PLAIN"]
        case "rotated":
            return constants["ROTATION"] > 1
        case "row_words" | "column_words" | "row_units" | "column_units":
            return constants[name.split("_")[0].upper()] is not None
    return True


def _expected(kernel: Any, constants: dict[str, Any], about: dict[str, Any]) -> Expected:
    if kernel is largest_kernel:
        tile = [constants["BLOCK_R"], constants["BLOCK_C"]]
        axis = -2 if constants["COLUMNS"] else -1
        return Expected("largest", dict(about) | {"tile": tile, "axis": axis})
    return Expected("block16", dict(about))
