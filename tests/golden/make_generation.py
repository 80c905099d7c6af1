"""Generate greedily with transformers from checkpoints in tests/golden/huggingface, and store the tokens.

Run with torch 2.15.0, transformers 5.23.0 and numpy 2.5.5:

    python tests/golden/make_generation.py

generation.npz   for each of NAMES: NAME/prompt [2, 9], NAME/tokens [2, 40] int32, from `generate` in float32
                 top_p/logits [8, 64] float32; top_p/P [8, 64] bool: what TopPLogitsWarper(P) keeps
                 versions
"""

import importlib.metadata
import pathlib

import numpy as np
import torch
from transformers import LlamaForCausalLM, TopPLogitsWarper

GOLDEN = pathlib.Path(__file__).parent
NAMES = ("llama2", "llama3", "llama3.1", "llama3.2")


def main():
    found = {}
    for folder in (GOLDEN / "huggingface" / name for name in NAMES):
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        stored = np.load(folder / "logits.npz")
        with torch.no_grad():
            logits = model(torch.from_numpy(stored["tokens"]).long()).logits.numpy()
        assert np.max(np.abs(logits - stored["logits"])) < 1e-4, folder
        prompt = stored["tokens"][:, :9]
        options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        ids = torch.from_numpy(prompt).long()
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, 9:]
        found |= {f"{folder.name}/prompt": prompt, f"{folder.name}/tokens": tokens.numpy().astype(np.int32)}
    logits = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32) * 3
    found["top_p/logits"] = logits
    for p in (0.1, 0.5, 0.9):
        kept = TopPLogitsWarper(p)(None, torch.from_numpy(logits))
        found[f"top_p/{p}"] = np.isfinite(kept.numpy())
    packages = ("torch", "transformers", "numpy")
    found["versions"] = np.array([f"{p} {importlib.metadata.version(p)}" for p in packages])
    np.savez_compressed(GOLDEN / "generation.npz", **found)


if __name__ == "__main__":
    main()
