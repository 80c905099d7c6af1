"""MXFP4 and NVFP4 in the layouts of compressed-tensors, which transformers and vLLM load.

Matrix NAME becomes NAME.weight_packed, uint8 [out, in / 2] with element 2i in the low nibble, and
NAME.weight_scale: in `mxfp4-pack-quantized` uint8 [out, in / 32], E8M0 bytes; in `nvfp4-pack-quantized` E4M3
[out, in / 16], beside NAME.weight_global_scale and, for rounded activations, NAME.input_global_scale. These
two are float32 [1] and divide: 2688 / amax, where 2688 is 6 times 448.

Source: compressed-tensors 0.20, `compressors` and `quantization/quant_scheme.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from models.huggingface.quantized import FP4

METHOD = "compressed-tensors"
WEIGHT, SCALE = "weight_packed", "weight_scale"
"""The names of a matrix's two tensors."""
DIVISOR, INPUT_DIVISOR = "weight_global_scale", "input_global_scale"
"""The names of NVFP4's divisors."""
_FORMATS: Mapping[str, FP4] = {"mxfp4-pack-quantized": "mxfp4", "nvfp4-pack-quantized": "nvfp4"}
_FP4: Mapping[str, Any] = {"num_bits": 4, "type": "float", "symmetric": True}
_SCHEMES: Mapping[FP4, Mapping[str, Any]] = {
    "mxfp4": {**_FP4, "strategy": "group", "group_size": 32},
    "nvfp4": {**_FP4, "strategy": "tensor_group", "group_size": 16},
}
_INPUTS: Mapping[FP4, Mapping[str, Any]] = {
    "mxfp4": {"dynamic": True},
    "nvfp4": {"dynamic": "local", "observer": "static_minmax"},
}
_SCALE_DTYPES: Mapping[FP4, str] = {"mxfp4": "torch.uint8", "nvfp4": "torch.float8_e4m3fn"}


def configuration(number: FP4, excluded: Sequence[str], *, activations: bool) -> dict[str, Any]:
    """Returns config.json's `quantization_config`.

    Args:
      excluded: the linear modules that are not quantized.
      activations: consumers round activations too, as they come.
    """
    name = next(name for name, known in _FORMATS.items() if known == number)
    scheme = {**_SCHEMES[number], **dict.fromkeys(("scale_dtype", "zp_dtype"), _SCALE_DTYPES[number])}
    group = {
        "targets": ["Linear"],
        "weights": {**scheme, "dynamic": False},
        "input_activations": {**scheme, **_INPUTS[number]} if activations else None,
        "output_activations": None,
        "format": name,
    }
    return {
        "quant_method": METHOD,
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(excluded),
        "kv_cache_scheme": None,
    }


def number_of(raw: Mapping[str, Any]) -> FP4:
    """Returns the format of a `quantization_config`'s weights.

    Raises:
      ValueError: they are stored otherwise; the message names the scheme.
    """
    sparse = raw.get("sparsity_config")
    others = {
        "transform_config": raw.get("transform_config"),  # rotations that consumers apply
        "sparsity_config": sparse and not (isinstance(sparse, dict) and sparse.get("format") == "dense"),
    }
    if field := next((name for name, given in others.items() if given), None):
        raise ValueError(f"{METHOD} checkpoints with {field} are not supported")
    groups = raw.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ValueError("quantization_config has no config_groups")
    names = set()
    for name, group in groups.items():
        if not isinstance(group, dict) or not isinstance(weights := group.get("weights"), dict):
            raise ValueError(f"quantization_config.config_groups.{name} has no weights")
        stored = group.get("format") or raw.get("format")
        if not isinstance(stored, str) or stored not in _FORMATS:
            raise ValueError(
                f"{METHOD} format {stored!r} is not supported; {' and '.join(map(repr, _FORMATS))} are"
            )
        names.add(stored)
        for field, only in _SCHEMES[_FORMATS[stored]].items():
            if weights.get(field) != only:
                raise ValueError(
                    f"{METHOD} weights have {field} {weights.get(field)!r}; "
                    f"only {only!r} is {_FORMATS[stored].upper()}"
                )
    if len(names) > 1:
        raise ValueError(f"{METHOD} checkpoints of several formats are not supported: {', '.join(names)}")
    return _FORMATS[names.pop()]
