"""A Llama as one GGUF file for llama.cpp, with linear layers in MXFP4.

ggml's MXFP4 block has 17 bytes: the E8M0 scale, then byte j with element j in its low and element j + 16 in
its high nibble. Other matrices are in bfloat16, norms in float32. llama.cpp rotates neighbouring channels,
and Hugging Face's Llama the halves of a head, so the rows of query and key are interleaved. The package gguf
keeps all tensors in memory until it writes them.

Source: ggml, `block_mxfp4`; llama.cpp, the conversion of `LlamaForCausalLM`; package gguf 0.19.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from models import decoder
from models.attention import rope_angles
from models.configs import DecoderConfig
from models.huggingface.architectures import model_type, shape_of, views
from models.huggingface.quantized import QuantizedWeight, names_of, quantized_weights
from models.huggingface.weights import progress
from mxjax import Operand
from mxjax.numerics.formats import BLOCK

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_OTHER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LLAMA3_SPLIT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
"""How the pattern begins by which Llama 3's tokenizer splits text."""


def write_gguf(
    library: Any,
    path: pathlib.Path,
    config: DecoderConfig,
    params: decoder.Params,
    operands: Mapping[str, Operand],
    raw: Mapping[str, Any],
) -> None:
    """Writes the file, with the tokenizer.json beside it.

    Args:
      library: the package gguf.
      operands: how to quantize, by the names of our layers.
      raw: the config.json, for context and token ids.
    Raises:
      ValueError: the model or the tokenizer is none that this writes; see also `quantized_weights`.
    """
    if model_type(config) != "llama" or config.qkv_bias or config.out_bias or config.yarn:
        raise ValueError("--quantize gguf writes Llamas without biases and YaRN alone; use --quantize mxfp4")
    vocabulary = _vocabulary(path.parent / "tokenizer.json", config.vocab_size)
    types, packed = library.GGMLQuantizationType, {f"{name}.weight" for name in names_of(operands)}
    writer = library.GGUFWriter(path, "llama")
    _write_facts(writer, config, raw)
    for name, value in vocabulary.items():
        getattr(writer, f"add_{name}")(value)
    for name, view in progress(views(config, params), "exporting"):
        if name in packed:
            continue
        value, dtype = view.reshape(shape_of(name, view)), types.F32
        if value.ndim > 1:
            value, dtype = _interleaved(config, name, value).astype(ml_dtypes.bfloat16), types.BF16
            value = np.ascontiguousarray(value).view(np.uint8)
        writer.add_tensor(_gguf_name(name), np.ascontiguousarray(value), raw_dtype=dtype)
    for module, weight in quantized_weights(config, params, operands):
        name = f"{module}.weight"
        codes, scales = (_interleaved(config, name, part) for part in (weight.codes, weight.scales))
        writer.add_tensor(_gguf_name(name), blocks_of(QuantizedWeight(codes, scales)), raw_dtype=types.MXFP4)
    if config.rope_scaling is not None:
        writer.add_tensor("rope_freqs.weight", _rope_factors(config), raw_dtype=types.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def blocks_of(weight: QuantizedWeight) -> np.ndarray:
    """Returns ggml's blocks, uint8 [out, 17 * in / 32]."""
    rows = len(weight.codes)
    halves = weight.codes.reshape(rows, -1, 2, BLOCK // 2)
    nibbles = halves[:, :, 0] | (halves[:, :, 1] << 4)
    return np.concatenate([weight.scales[..., None], nibbles], axis=-1).reshape(rows, -1)


def _interleaved(config: DecoderConfig, name: str, value: np.ndarray) -> np.ndarray:
    """Returns rows in llama.cpp's order: in a head of query or key, i + H / 2 follows channel i."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return value
    return value.reshape(-1, 2, config.head_dim // 2, value.shape[-1]).swapaxes(1, 2).reshape(value.shape)


def _rope_factors(config: DecoderConfig) -> np.ndarray:
    """Returns the divisor of each pair of channels' frequency, float32 [H / 2]."""
    plain = dataclasses.replace(config, rope_scaling=None)
    position = jnp.ones((1, 1), jnp.int32)
    first, scaled = (np.asarray(jax.device_get(rope_angles(position, c)))[0, 0] for c in (plain, config))
    return (first / scaled).astype(np.float32)


def _gguf_name(name: str) -> str:
    module = name.removesuffix(".weight")
    if module in _OTHER_NAMES:
        return f"{_OTHER_NAMES[module]}.weight"
    _, _, block, rest = module.split(".", 3)
    return f"blk.{block}.{_NAMES[rest]}.weight"


def _write_facts(writer: Any, config: DecoderConfig, raw: Mapping[str, Any]) -> None:
    writer.add_context_length(raw.get("max_position_embeddings") or 2048)
    writer.add_embedding_length(config.d_model)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    for which in ("bos", "eos"):
        token = raw.get(f"{which}_token_id")
        if (token := token[0] if isinstance(token, list) and token else token) is not None:
            getattr(writer, f"add_{which}_token_id")(token)


def _vocabulary(path: pathlib.Path, vocab_size: int) -> dict[str, Any]:
    """Returns the metadata of a byte-level BPE tokenizer, by the names of the writer's methods.

    Raises:
      ValueError: there is no tokenizer, or it is of another kind.
    """
    if not path.exists():
        raise ValueError("--quantize gguf needs a tokenizer, and the run has none: it was trained on bytes")
    raw = json.loads(path.read_bytes())
    splits = json.dumps(raw.get("pre_tokenizer"))
    if raw.get("model", {}).get("type") != "BPE" or '"ByteLevel"' not in splits:
        raise ValueError("--quantize gguf takes byte-level BPE tokenizers only")
    if '"Split"' in splits and _LLAMA3_SPLIT not in splits:
        raise ValueError("--quantize gguf takes tokenizers that split text as GPT-2's or Llama 3's do")
    tokens = {index: (token, 1) for token, index in raw["model"]["vocab"].items()}
    for token in raw.get("added_tokens", []):  # ggml's types: 1 normal, 3 control, 4 user-defined, 5 unused
        tokens[token["id"]] = token["content"], 3 if token["special"] else 4
    words, kinds = zip(*(tokens.get(i, (f"[PAD{i}]", 5)) for i in range(vocab_size)), strict=True)
    merges = [m if isinstance(m, str) else " ".join(m) for m in raw["model"]["merges"]]
    pre = "llama-bpe" if '"Split"' in splits else "gpt-2"
    return {
        "tokenizer_model": "gpt2",
        "tokenizer_pre": pre,
        "token_list": list(words),
        "token_types": list(kinds),
        "token_merges": merges,
    }
