"""The ahead-of-time builds of causal attention: Llama 3.1 8B's heads, and small ones with masked tails.

Some have documents, a window and sinks.
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
    sizes = dict(zip("bsgrh", shape, strict=True)) | ({"is_masked": True} if is_masked else {})
    flags: dict[str, Any] = {"CAUSAL": True, "MASKED": is_masked}
    flags |= {"SINKS": is_masked} if which == "forward" else {}
    name = f"attention_{which}_{'x'.join(map(str, shape))}_{'x'.join(map(str, blocks))}"
    return Build(
        name=name + ("_masked" if is_masked else ""),
        kernel=_KERNELS[which],
        signature=_signature(which, shape, is_masked),
        constants=constants_of(shape, blocks, target) | flags,
        grid=grid_of(which, shape, blocks),
        expected=Expected("attention", {"which": which, **sizes}, TOLERANCE),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
        options=OPTIONS.get(table_of(target), {}),
    )


def _signature(which: str, shape: tuple[int, ...], is_masked: bool) -> dict[str, Argument]:
    b, s, g, r, h = shape
    queries: Any = ((b, s, g, r, h), "bfloat16")
    keys: Any = ((b, s, g, h), "bfloat16")
    rows: Any = ((b, g, r, s), "float32")
    inputs = {
        "q": Argument(*queries, meaning="queries"),
        "k": Argument(*keys, meaning="keys"),
        "v": Argument(*keys, meaning="values"),
    }
    unread = None if is_masked else "not read"
    first_key = Argument((b, s), "int32", meaning=unread or "the first key that each query sees")
    if which == "forward":
        inputs |= {
            "first_key": first_key,
            "sinks": Argument((b, g, r), "float32", meaning=unread or "logits without a value"),
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
    meaning = unread or "the first later query that does not see each key"
    inputs["queries_end"] = Argument((b, s), "int32", meaning=meaning)
    gradients = {name: Argument(*keys, "output", f"gradient of {name[1]}") for name in ("dk", "dv")}
    return inputs | gradients
