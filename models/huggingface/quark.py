"""MXFP4 in the layout of AMD Quark, which vLLM and SGLang load on ROCm.

Matrix NAME becomes NAME.weight, uint8 [out, in / 2] with element 2i in the low nibble, and NAME.weight_scale,
uint8 [out, in / 32], E8M0 bytes.

Source: AMD's checkpoints that Quark 0.9 exported; vLLM, `quantization/quark/quark.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from models.huggingface.quantized import FP4

METHOD = "quark"
WEIGHT, SCALE = "weight", "weight_scale"
"""The names of a matrix's two tensors."""
_MXFP4: Mapping[str, Any] = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
_OTHER_FIELDS: Mapping[str, Any] = {
    "ch_axis": -1,
    "is_scale_quant": False,
    "mx_element_dtype": None,
    "observer_cls": "PerBlockMXObserver",
    "round_method": "half_even",
    "scale_calculation_mode": "even",  # how consumers scale activations; nothing reads it of stored weights
    "scale_type": "float",
    "symmetric": None,
}


def configuration(excluded: Sequence[str], *, activations: bool) -> dict[str, Any]:
    """Returns config.json's `quantization_config`.

    Args:
      excluded: the linear modules that are not quantized.
      activations: consumers round activations to MXFP4 too, as they come.
    """
    mxfp4 = {**_MXFP4, **_OTHER_FIELDS}
    return {
        "quant_method": METHOD,
        "quant_mode": "eager_mode",
        "version": "0.9",
        "export": {
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "pack_method": "reorder",
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
        "exclude": list(excluded),
        "global_quant_config": {
            "weight": {**mxfp4, "is_dynamic": False},
            "input_tensors": {**mxfp4, "is_dynamic": True} if activations else None,
            "output_tensors": None,
            "bias": None,
            "target_device": None,
        },
        "algo_config": None,
        "kv_cache_quant_config": {},
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "softmax_quant_spec": None,
    }


def number_of(raw: Mapping[str, Any]) -> FP4:
    """Returns the format of a `quantization_config`'s weights, "mxfp4".

    Raises:
      ValueError: they are stored otherwise; the message names the scheme.
    """
    for field in ("layer_quant_config", "layer_type_quant_config"):
        if raw.get(field):
            raise ValueError(f"{METHOD} checkpoints with {field} are not supported")
    every = raw.get("global_quant_config")
    weights = every.get("weight") if isinstance(every, dict) else None
    if not isinstance(weights, dict):
        raise ValueError("quantization_config has no global_quant_config.weight of one scheme")
    for field, only in _MXFP4.items():
        if weights.get(field) != only:
            raise ValueError(f"{METHOD} weights have {field} {weights.get(field)!r}; only {only!r} is MXFP4")
    export = raw.get("export")
    packing = export.get("pack_method") if isinstance(export, dict) else None
    if packing not in (None, "reorder"):
        raise ValueError(f"{METHOD} pack_method {packing!r} is not supported; 'reorder' is")
    return "mxfp4"
