"""The ahead-of-time builds of causal attention: Llama 3.1 8B's heads, and small ones with masked tails.

Some have documents, a window and sinks.
"""

import dataclasses
from typing import Any

import jax

from mxjax.kernels.attention.blocks import HEAD_SIZES, Blocks, candidates
from mxjax.kernels.attention.launches import forward, key_gradients, query_gradients
from mxjax.kernels.cases.builds import Build, Expected, build_of
from mxjax.kernels.launch import calls_of
from mxjax.runtime.devices import Target

LLAMA = (1, 8192, 8, 4, 128)
"""b, s, g, r and h of a sequence of Llama 3.1 8B."""
_LAUNCHES: dict[str, Any] = {
    "forward": forward,
    "key_gradients": key_gradients,
    "query_gradients": query_gradients,
}
TOLERANCE = 4


def builds(target: Target) -> list[Build]:
    """Returns the builds of the three kernels."""
    wanted = []
    for which in _LAUNCHES:
        wanted.append(_build(which, LLAMA, getattr(candidates(target, 128), which)[0], target))
        for h in HEAD_SIZES:
            blocks = getattr(candidates(target, h), which)[0]
            wanted.append(_build(which, (1, max(blocks[:2]) + 21, 1, 2, h), blocks, target))
        blocks = getattr(candidates(target, 64), which)[0]
        wanted.append(_build(which, (1, max(blocks[:2]) + 21, 1, 2, 64), blocks, target, is_masked=True))
    return wanted


def candidate_builds(target: Target) -> list[Build]:
    """Returns a build of each candidate for a sequence with masked tails and two heads of keys."""
    found = []
    for h in HEAD_SIZES:
        for which, every in candidates(target, h)._asdict().items():
            for blocks in every:
                build = _build(which, (1, max(blocks[:2]) + 21, 2, 2, h), blocks, target)
                found.append(dataclasses.replace(build, name=f"candidate_{build.name}"))
    return found


def _build(
    which: str, shape: tuple[int, ...], blocks: Blocks, target: Target, is_masked: bool = False
) -> Build:
    b, s, g, r, h = shape
    q, k = (jax.ShapeDtypeStruct(x, "bfloat16") for x in (shape, (b, s, g, h)))
    rows = jax.ShapeDtypeStruct((b, g, r, s), "float32")
    masks = {"first_key": jax.ShapeDtypeStruct((b, s), "int32")} if is_masked else {}
    if which == "forward":
        arrays = (q, k, k)
        masks |= {"sinks": jax.ShapeDtypeStruct((b, g, r), "float32")} if is_masked else {}
    else:
        arrays = (q, k, k, q, rows, rows)

    def launch(*given):
        named = dict(zip(masks, given[len(arrays) :], strict=True))
        return _LAUNCHES[which](*given[: len(arrays)], target, blocks, **named)

    [call] = calls_of(launch, *arrays, *masks.values())
    sizes = dict(zip("bsgrh", shape, strict=True)) | ({"is_masked": True} if is_masked else {})
    name = f"attention_{which}_{'x'.join(map(str, shape))}_{'x'.join(map(str, blocks))}"
    expected = Expected("attention", {"which": which, **sizes}, TOLERANCE)
    return build_of(name + ("_masked" if is_masked else ""), call, expected)
