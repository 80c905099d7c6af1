"""gpt-oss's own layout of MXFP4, which transformers and vLLM load: its experts are packed, all else is not.

Tensor NAME of experts [expert, in, out] becomes NAME_blocks, uint8 [expert, out, in / 32, 16] with element 2i
in the low nibble, and NAME_scales, uint8 [expert, out, in / 32], E8M0 bytes.

Source: OpenAI's checkpoints; transformers 5.23, `integrations/mxfp4.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from models.huggingface.files import Reader, Spec
from models.huggingface.quantized import QuantizedWeight
from mxjax.numerics.formats import BLOCK

METHOD = "mxfp4"
BLOCKS, SCALES = "_blocks", "_scales"
"""The ends of the names of an expert tensor's two parts."""
_NOT_PACKED = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")


def configuration(excluded: Sequence[str], *, activations: bool) -> dict[str, Any]:
    """Returns config.json's `quantization_config`; `excluded` are modules of experts that are not packed.

    Raises:
      ValueError: consumers shall round activations, which this layout cannot say.
    """
    if activations:
        raise ValueError("--activations: gpt-oss's layout has packed weights only; leave it out")
    return {"quant_method": METHOD, "modules_to_not_convert": [*_NOT_PACKED, *excluded]}


def unpacked(specs: Mapping[str, Spec]) -> dict[str, Spec]:
    """Returns the specs with one of bfloat16 [..., in, out] for each pair of MXFP4 blocks and scales."""
    found = {name: spec for name, spec in specs.items() if _base(name, specs) is None}
    for name, spec in specs.items():
        if (base := _base(name, specs)) and name.endswith(BLOCKS):
            *batch, out, blocks, _ = spec.shape
            found[base] = Spec("BF16", (*batch, blocks * BLOCK, out))
    return found


def _base(name: str, specs: Mapping[str, Spec]) -> str | None:
    """Returns the name of the tensor that MXFP4 blocks or scales belong to; None for other tensors."""
    base = name.removesuffix(BLOCKS).removesuffix(SCALES)
    blocks, scales = specs.get(base + BLOCKS), specs.get(base + SCALES)
    if base == name or blocks is None or scales is None:
        return None
    is_pair = blocks.dtype == scales.dtype == "U8" and blocks.shape == (*scales.shape, BLOCK // 2)
    return base if is_pair and len(blocks.shape) > 2 else None


def read_tensor(reader: Reader, name: str) -> np.ndarray:
    """Returns a tensor, exactly what MXFP4 blocks and scales stand for if there is such a pair."""
    if name in reader.specs:
        return reader.read(name)
    blocks, scales = reader.read(name + BLOCKS), reader.read(name + SCALES)
    packed = blocks.reshape(*scales.shape[:-1], -1)
    return QuantizedWeight.unpacked(packed, scales).values().swapaxes(-1, -2)
