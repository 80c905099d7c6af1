"""MXFP4 in the layout `mxfp4-pack-quantized` of compressed-tensors, which transformers and vLLM load.

Matrix NAME becomes NAME.weight_packed, uint8 [out, in / 2] with element 2i in the low nibble, and
NAME.weight_scale, uint8 [out, in / 32], E8M0 bytes.

Source: compressed-tensors 0.20, `compressors/mxfp4` and the schemes MXFP4A16 and MXFP4 of
`quantization/quant_scheme.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

METHOD = "compressed-tensors"
FORMAT = "mxfp4-pack-quantized"
WEIGHT, SCALE = "weight_packed", "weight_scale"
"""The names of a matrix's two tensors."""
_MXFP4: Mapping[str, Any] = {
    "num_bits": 4,
    "type": "float",
    "strategy": "group",
    "group_size": 32,
    "symmetric": True,
}


def configuration(excluded: Sequence[str], *, activations: bool) -> dict[str, Any]:
    """Returns config.json's `quantization_config`.

    Args:
      excluded: the linear modules that are not quantized.
      activations: consumers round activations to MXFP4 too, as they come.
    """
    stored = {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    group = {
        "targets": ["Linear"],
        "weights": {**_MXFP4, "dynamic": False, **stored},
        "input_activations": {**_MXFP4, "dynamic": True, **stored} if activations else None,
        "output_activations": None,
        "format": FORMAT,
    }
    return {
        "quant_method": METHOD,
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(excluded),
        "kv_cache_scheme": None,
    }


def check(raw: Mapping[str, Any]) -> None:
    """Raises ValueError, which names the scheme, unless weights are stored in this layout."""
    groups = raw.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ValueError("quantization_config has no config_groups")
    for name, group in groups.items():
        if not isinstance(group, dict) or not isinstance(weights := group.get("weights"), dict):
            raise ValueError(f"quantization_config.config_groups.{name} has no weights")
        if (stored := group.get("format") or raw.get("format")) != FORMAT:
            raise ValueError(f"{METHOD} format {stored!r} is not supported; {FORMAT!r} is")
        for field, only in _MXFP4.items():
            if weights.get(field) != only:
                raise ValueError(
                    f"{METHOD} weights have {field} {weights.get(field)!r}; only {only!r} is MXFP4"
                )
