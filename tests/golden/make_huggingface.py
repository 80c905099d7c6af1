"""Save tiny random Llamas as transformers saves them, and store the logits that it computes.

Run with torch 2.15.0 and numpy 2.5.5, once with transformers 4.57.6 and once with 5.23.0:

    python tests/golden/make_huggingface.py

Each version writes its own folders huggingface/NAME, as `save_pretrained` leaves them (config.json,
generation_config.json, safetensors), and in each, added to them,

    logits.npz   tokens [2, 48] int32; logits [2, 48, 64] float32, computed in float32; versions

version 4  llama2     float16, one file; as many key/value heads as heads; no rope scaling
           llama3.1   float32, shards; grouped heads; llama3 rope scaling, as rope_theta and rope_scaling
version 5  llama3     bfloat16, one file; grouped heads; rope_parameters of type default
           llama3.2   bfloat16, shards; tied head, head_dim other than hidden_size / heads; rope_parameters

Weights are multiples of 1/64, exact in every dtype, with q_proj and k_proj wide enough that attention is far from
uniform. Sequences are longer than the 16 positions that the rope scaling is set for, so that it shows.
"""

import importlib.metadata
import pathlib
import shutil

import numpy as np
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

VERSION = int(transformers.__version__.split(".")[0])
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
MODELS = {
    4: {
        "llama2": (torch.float16, "5GB", {"rms_norm_eps": 1e-5}),
        "llama3.1": (
            torch.float32,
            "40KB",
            {"num_key_value_heads": 2, "rope_theta": 500000.0, "rope_scaling": SCALING},
        ),
    },
    5: {
        "llama3": (
            torch.bfloat16,
            "5GB",
            {
                "num_key_value_heads": 2,
                "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            },
        ),
        "llama3.2": (
            torch.bfloat16,
            "20KB",
            {
                "num_key_value_heads": 1,
                "head_dim": 16,
                "tie_word_embeddings": True,
                "rope_parameters": SCALING | {"rope_theta": 500000.0, "factor": 32.0},
            },
        ),
    },
}


def main():
    for name, (dtype, shard, options) in MODELS[VERSION].items():
        config = LlamaConfig(**SMALL, **options, attn_implementation="eager")
        model = LlamaForCausalLM(config).eval()
        rng = np.random.default_rng(0)
        with torch.no_grad():
            for key, tensor in model.named_parameters():
                center = 1.0 if "norm" in key else 0.0
                std = 0.2 if any(part in key for part in ("norm", "q_proj", "k_proj")) else 0.08
                tensor.copy_(torch.from_numpy(np.round(rng.normal(center, std, tensor.shape) * 64) / 64))
        folder = pathlib.Path(__file__).parent / "huggingface" / name
        shutil.rmtree(folder, ignore_errors=True)
        tokens = rng.integers(0, config.vocab_size, (2, 48))
        with torch.no_grad():
            logits = model.float()(torch.from_numpy(tokens), use_cache=False).logits.numpy()
        model.to(dtype).save_pretrained(folder, max_shard_size=shard)
        packages = ("torch", "transformers", "numpy")
        versions = [f"{p} {importlib.metadata.version(p)}" for p in packages]
        np.savez_compressed(
            folder / "logits.npz", tokens=tokens.astype(np.int32), logits=logits, versions=np.array(versions)
        )
        print(name, sorted(f"{f.name} {f.stat().st_size}" for f in folder.iterdir()))


if __name__ == "__main__":
    main()
