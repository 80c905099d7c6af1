"""Run a tiny random Llama 3.1 style model in transformers and store what it gives.

Run with Python 3.11, torch 2.13.0+cpu, transformers 5.23.0, numpy 2.4.6:

    python tests/golden/make_llama.py

Writes llama.npz next to this file, all float32 unless said:

    state/NAME   every tensor of the state dict under its Hugging Face name, [out, in]
    tokens       [2, 160] int32
    logits       [2, 160, 96]
    loss         [] mean cross-entropy of logits[:, :-1] against tokens[:, 1:]
    grad/NAME    gradient of loss for the three tensors in GRADS
    config       [] JSON string, as LlamaConfig.to_dict gives it
    versions     [n] versions this file was made with

Weights are multiples of 1/64 (so exact in bfloat16, and small once compressed)
with a standard deviation of 0.08, of 0.2 for q_proj and k_proj so that attention
is far from uniform; norm weights are multiples of 1/64 around 1. The sequence is
longer than the 64 positions the rope scaling is set for, so that the scaling shows.
On another processor logits may differ by about 4e-6 and gradients by 4e-7.
"""

import importlib.metadata
import json
import pathlib
import platform

import numpy as np
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

GRADS = (
    "model.embed_tokens.weight",
    "model.layers.1.self_attn.k_proj.weight",
    "model.layers.2.mlp.down_proj.weight",
)


def main():
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        attn_implementation="eager",
        dtype="float32",
    )
    model = LlamaForCausalLM(config).eval()
    rng = np.random.default_rng(0)
    out = {}
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            center = 1.0 if "norm" in name else 0.0
            std = 0.2 if "norm" in name or "q_proj" in name or "k_proj" in name else 0.08
            value = np.round(rng.normal(center, std, tensor.shape) * 64) / 64
            tensor.copy_(torch.from_numpy(value))
            out[f"state/{name}"] = tensor.numpy().copy()

    tokens = torch.from_numpy(rng.integers(0, config.vocab_size, (2, 160)))
    logits = model(tokens, use_cache=False).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()

    out["tokens"] = tokens.numpy().astype(np.int32)
    out["logits"] = logits.detach().numpy()
    out["loss"] = loss.detach().numpy()
    params = dict(model.named_parameters())
    for name in GRADS:
        out[f"grad/{name}"] = params[name].grad.numpy()
    out["config"] = np.array(json.dumps(config.to_dict(), sort_keys=True))
    packages = ("torch", "transformers", "numpy")
    versions = [f"{p} {importlib.metadata.version(p)}" for p in packages]
    out["versions"] = np.array([f"python {platform.python_version()}", *versions])
    path = pathlib.Path(__file__).with_name("llama.npz")
    np.savez_compressed(path, **out)
    print(path.name, len(out), "arrays", path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
