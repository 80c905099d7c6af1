"""The ahead-of-time builds of causal attention: Llama 3.1 8B's heads, and small ones with masked tails.

None has windows, documents or sinks, which run on CUDA alone.
"""

import dataclasses
from typing import Any

from mxjax.kernels.attention.backward import key_gradients_kernel, query_gradients_kernel
from mxjax.kernels.attention.blocks import HEAD_SIZES, OPTIONS, Blocks, candidates, table_of
from mxjax.kernels.attention.forward import forward_kernel
from mxjax.kernels.attention.launches import constants_of, grid_of
from mxjax.kernels.cases.builds import Argument, Build, Expected
from mxjax.runtime.devices import Target

LLAMA = (1, 8192, 8, 4, 128)
"""b, s, g, r and h of a sequence of Llama 3.1 8B."""
_KERNELS = {
    "forward": forward_kernel,
    "key_gradients": key_gradients_kernel,
    "query_gradients": query_gradients_kernel,
}
TOLERANCE = 4
_LSE = "natural logarithm of each query's sum of exp(scores)"


def builds(target: Target) -> list[Build]:
    """Returns the builds of the three kernels."""
    wanted = []
    for which in _KERNELS:
        wanted.append(_build(which, LLAMA, getattr(candidates(target, 128), which)[0], target))
        for h in HEAD_SIZES:
            blocks = getattr(candidates(target, h), which)[0]
            wanted.append(_build(which, (1, max(blocks[:2]) + 21, 1, 2, h), blocks, target))
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


def _build(which: str, shape: tuple[int, ...], blocks: Blocks, target: Target) -> Build:
    sizes = dict(zip("bsgrh", shape, strict=True))
    unmasked: dict[str, Any] = {"MASKED": False} | ({"SINKS": False} if which == "forward" else {})
    return Build(
        name=f"attention_{which}_{'x'.join(map(str, shape))}_{'x'.join(map(str, blocks))}",
        kernel=_KERNELS[which],
        signature=_signature(which, shape),
        constants=constants_of(shape, blocks, target) | unmasked,
        grid=grid_of(which, shape, blocks),
        expected=Expected("attention", {"which": which, **sizes}, TOLERANCE),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
        options=OPTIONS.get(table_of(target), {}),
    )


def _signature(which: str, shape: tuple[int, ...]) -> dict[str, Argument]:
    b, s, g, r, h = shape
    queries: Any = ((b, s, g, r, h), "bfloat16")
    keys: Any = ((b, s, g, h), "bfloat16")
    rows: Any = ((b, g, r, s), "float32")
    inputs = {
        "q": Argument(*queries, meaning="queries"),
        "k": Argument(*keys, meaning="keys"),
        "v": Argument(*keys, meaning="values"),
    }
    first_key = Argument((b, s), "int32", meaning="not read")
    if which == "forward":
        inputs |= {
            "first_key": first_key,
            "sinks": Argument((b, g, r), "float32", meaning="not read"),
        }
        outputs = {
            "out": Argument(*queries, "output", "softmax(q @ k.T / sqrt(h)) @ v, causal"),
            "lse": Argument(*rows, "output", _LSE),
        }
        return inputs | outputs
    inputs |= {
        "dout": Argument(*queries, meaning="gradient of out"),
        "lse": Argument(*rows, meaning=_LSE),
        "delta": Argument(*rows, meaning="sum of out * dout over h"),
        "first_key": first_key,
    }
    if which == "query_gradients":
        return inputs | {"dq": Argument(*queries, "output", "gradient of q")}
    inputs["queries_end"] = Argument((b, s), "int32", meaning="not read")
    gradients = {name: Argument(*keys, "output", f"gradient of {name[1]}") for name in ("dk", "dv")}
    return inputs | gradients
