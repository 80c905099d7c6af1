"""Save tiny random models of each architecture as transformers saves them, and what it computes of them.

Run with torch 2.13.0+cpu, transformers 5.23.0 and numpy 2.4.6; names make these alone:

    python tests/golden/make_architectures.py [NAME ...]

smollm3 and qwen3_moe_mixed are by torch 2.15.0, transformers 5.24.0 and numpy 2.5.5.

architectures/NAME has what `save_pretrained` leaves (config.json, safetensors in bfloat16) and golden.npz:

    tokens [2, 40] int32; logits [2, 40, 64] float32; loss, the mean cross-entropy of all tokens but the first
    norm/TENSOR    the norm of its gradient, by the tensor's name in the model, which may be another than in the file
    grad/TENSOR    the gradient of tensors of up to 600 elements
    generated [2, 12] int32, greedily after the first 8 tokens; versions

all computed in float32. gpt_oss has experts in MXFP4, as OpenAI's checkpoint: random bytes, unpacked by transformers.
Windows and YaRN's original context are shorter than the sequences. qwen3_moe_mixed has MLPs in its outer layers and
experts in the others, smollm3 a layer without rotation by positions.
"""

import importlib.metadata
import json
import pathlib
import shutil
import sys

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16}
MODELS = {
    "llama": ("Llama", {"attention_bias": True}),
    "qwen2": ("Qwen2", {"head_dim": 8, "use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": 12}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": False},
    ),
    "smollm3": (
        "SmolLM3",
        {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 12, "rope_parameters": YARN}
        | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    ),
    "qwen3_moe_mixed": (
        "Qwen3Moe",
        {
            "num_hidden_layers": 4,
            "mlp_only_layers": [0, 3],
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 12,
            "swiglu_limit": 1.5,
            "rope_parameters": YARN | {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
        },
    ),
}
GOLDEN = pathlib.Path(__file__).parent / "architectures"


def randomize(model, rng):
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            center = 1.0 if "norm" in key else 0.0
            wide = any(part in key for part in ("norm", "q_proj", "k_proj", "gate.", "router", "sinks", "bias"))
            values = torch.from_numpy(rng.normal(center, 0.4 if wide else 0.12, tensor.shape))
            tensor.copy_(values.to(torch.bfloat16))


def pack_experts(model, rng):
    """Gives the experts values of MXFP4; returns their blocks and scales by OpenAI's names."""
    packed = {}
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
                experts, width, rows = tensor.shape
                blocks = torch.from_numpy(rng.integers(0, 256, (experts, rows, width // 32, 16), dtype=np.uint8))
                scales = torch.from_numpy(rng.integers(121, 124, blocks.shape[:3], dtype=np.uint8))
                values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
                tensor.copy_(values.reshape(tensor.shape))
                packed |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
    return packed


def save(model, folder, packed):
    model.to(torch.bfloat16).save_pretrained(folder)
    if packed:
        tensors = load_file(folder / "model.safetensors")
        kept = {key: value for key, value in tensors.items() if f"{key}_blocks" not in packed}
        save_file(kept | packed, folder / "model.safetensors", metadata={"format": "pt"})
        raw = json.loads((folder / "config.json").read_text())
        raw["quantization_config"] = {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        }
        (folder / "config.json").write_text(json.dumps(raw, indent=2))


def main():
    for name, (family, options) in ((name, MODELS[name]) for name in sys.argv[1:] or MODELS):
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**SMALL | options, attn_implementation="eager")
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        rng = np.random.default_rng(len(name))
        randomize(model, rng)
        packed = pack_experts(model, rng) if name == "gpt_oss" else {}
        tokens = torch.from_numpy(rng.integers(0, config.vocab_size, (2, 40)))
        logits = model(tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 64), tokens[:, 1:].reshape(-1))
        loss.backward()
        grads = {key: p.grad.numpy() for key, p in model.named_parameters()}
        found = {f"norm/{key}": np.float32(np.linalg.norm(g)) for key, g in grads.items()}
        found |= {f"grad/{key}": g for key, g in grads.items() if g.size <= 600}
        prompt = tokens[:, :8]
        options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with torch.no_grad():
            generated = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[:, 8:]
        folder = GOLDEN / name
        shutil.rmtree(folder, ignore_errors=True)
        save(model, folder, packed)
        (folder / "generation_config.json").unlink()
        packages = ("torch", "transformers", "numpy")
        np.savez_compressed(
            folder / "golden.npz",
            tokens=tokens.numpy().astype(np.int32),
            logits=logits.detach().numpy(),
            loss=loss.item(),
            generated=generated.numpy().astype(np.int32),
            versions=np.array([f"{p} {importlib.metadata.version(p)}" for p in packages]),
            **found,
        )
        print(name, sorted(f"{f.name} {f.stat().st_size}" for f in folder.iterdir()))


if __name__ == "__main__":
    main()
