"""The ahead-of-time builds of the quantizer of blocks of 16: its calls for tensors of published recipes."""

import functools
from collections.abc import Iterator

import jax

from mxjax.kernels.cases.builds import Build, Expected, build_of
from mxjax.kernels.cases.expected_block16 import uses_of_tensor
from mxjax.kernels.launch import Call, calls_of
from mxjax.kernels.quantize.block16 import quantize_block16, quantizer_of
from mxjax.kernels.quantize.block16_kernel import largest_kernel
from mxjax.runtime.devices import Target, use_target

LARGE, SMALL = (8192, 4096), (65, 97)
RECIPES = {
    "nvfp4": (LARGE, SMALL),
    "four_over_six": (LARGE, SMALL),
    "quartet2": (SMALL,),
    "ue5m3": (SMALL,),
    "tetrajet_v2": (SMALL,),
}
TENSORS = {"activation": "bfloat16", "gradient": "bfloat16", "weight": "float32"}
VIEWS = {"row_words": "bfloat16", "column_words": "bfloat16"}


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
    quantizer_of.cache_clear()  # JAX keeps the traces of its functions, with and without kernels
    with use_target(target):
        calls = calls_of(lambda x: quantize_block16(x, uses_of_tensor(recipe, tensor)), x)
    quantizer_of.cache_clear()
    about = {"shape": [*shape], "dtype": x.dtype.name, "recipe": recipe, "tensor": tensor}
    for i, call in enumerate(calls):
        name = f"block16_{shape[0]}x{shape[1]}_{recipe}_{tensor}_{i}"
        yield build_of(name, call, _expected(call, about), VIEWS, _unused(call))


def _unused(call: Call) -> set[str]:
    if call.kernel is largest_kernel:
        wanted = {"plain": call.constants["PLAIN"], "rotated": call.constants["ROTATION"] > 1}
        return {name for name in wanted if not wanted[name]}
    absent = (side for side in ("row", "column") if call.constants[side.upper()] is None)
    return {f"{side}_{what}" for side in absent for what in ("words", "units")}


def _expected(call: Call, about: dict) -> Expected:
    if call.kernel is not largest_kernel:
        return Expected("block16", about)
    tile = [call.constants["BLOCK_R"], call.constants["BLOCK_C"]]
    return Expected("largest", about | {"tile": tile, "axis": -2 if call.constants["COLUMNS"] else -1})
