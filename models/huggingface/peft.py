"""LoRA adapters in PEFT's layout, which PEFT, transformers and vLLM load onto the model they adapt.

Matrices that are one layer here, such as query, key and value, have the same A and parts of B.

Source: PEFT 0.21, `tuners/lora/config.py` and `utils/save_and_load.py`.
"""

import pathlib
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save

from models import decoder
from models.configs import DecoderConfig
from models.gemms import linear_layers
from models.huggingface.architectures import shape_of, views
from models.huggingface.files import write_json
from models.huggingface.quantized import names_of
from models.lora import Adapted


def write_adapters(
    folder: pathlib.Path, config: DecoderConfig, params: decoder.Params, base: str | None
) -> None:
    """Writes adapter_model.safetensors, in float32, and adapter_config.json.

    Args:
      params: parameters with adapters, from `models.lora.attach`.
      base: folder of the checkpoint that they adapt, from which PEFT loads it; None if unknown.
    """
    of_b = views(config, _with_b(params))
    tensors: dict[str, np.ndarray] = {}
    for layer in linear_layers(config):
        module, matrix = layer.split(".")
        for i, a in enumerate(np.asarray(params["blocks"][module][matrix].a)):
            for name in names_of(config, [f"blocks.{i}.{layer}"]):
                weight = f"{name}.weight"
                b = of_b[weight].reshape(shape_of(weight, of_b[weight]))
                for part, value in (("A", a.T), ("B", b)):
                    key = f"base_model.model.{name}.lora_{part}.weight"
                    tensors[key] = np.array(value, np.float32, order="C")
    data = save(tensors, {"format": "pt"})  # save_file lets nobody else read it
    (folder / "adapter_model.safetensors").write_bytes(data)
    rank = params["blocks"]["attention"]["out"].a.shape[-1]
    modules = sorted({name.split(".")[-3] for name in tensors})
    write_json(folder / "adapter_config.json", _configuration(rank, modules, base))


def _configuration(rank: int, modules: list[str], base: str | None) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,  # the factor of A B, alpha / r, is 1
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": modules,
    }


def _with_b(params: decoder.Params) -> decoder.Params:
    """Returns parameters with B in place of each adapted weight, and zeros without memory elsewhere."""

    def of_leaf(w):
        if isinstance(w, Adapted):
            return np.asarray(w.b)
        return np.broadcast_to(np.zeros((), np.float32), w.shape)

    return jax.tree.map(of_leaf, params, is_leaf=lambda w: isinstance(w, Adapted))
