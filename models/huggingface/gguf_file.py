"""A Llama, Mixtral or Qwen3-MoE as one GGUF file for llama.cpp, with linear layers in MXFP4.

ggml's MXFP4 block has 17 bytes: the E8M0 scale, then byte j with element j in its low and element j + 16 in
its high nibble. Other matrices are in bfloat16, norms and routers in float32; the experts of a layer share a
tensor [expert, out, in]. llama.cpp rotates neighbouring channels of Llamas, and Hugging Face the halves of a
head, so the rows of query and key are interleaved. The package gguf keeps all tensors in memory until it
writes them.

Source: ggml, `block_mxfp4`; llama.cpp, convert_hf_to_gguf.py; package gguf 0.19.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from models import decoder
from models.attention.causal import rope_angles
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
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **dict.fromkeys(("mlp.gate", "block_sparse_moe.gate"), "ffn_gate_inp"),
}
_EXPERT_NAMES = {
    **dict.fromkeys(("gate_proj", "w1"), "ffn_gate_exps"),
    **dict.fromkeys(("up_proj", "w3"), "ffn_up_exps"),
    **dict.fromkeys(("down_proj", "w2"), "ffn_down_exps"),
}
_OTHER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_KINDS = {"llama": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe"}
"""llama.cpp's architectures by Hugging Face's."""
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
    kind = _kind(config)
    vocabulary = _vocabulary(path.parent, config.vocab_size)
    writer = library.GGUFWriter(path, kind)
    _write_facts(writer, config, raw)
    for name, value in vocabulary.items():
        getattr(writer, f"add_{name}")(value)
    experts: dict[str, list[np.ndarray]] = {}
    for module, value, dtype in _tensors(library.GGMLQuantizationType, config, params, operands):
        name = _gguf_name(module)
        if ".experts." not in module or config.experts is None:
            writer.add_tensor(name, value, raw_dtype=dtype)
            continue
        experts.setdefault(name, []).append(value)
        if len(experts[name]) == config.experts.n:
            writer.add_tensor(name, np.stack(experts.pop(name)), raw_dtype=dtype)
    if config.rope_scaling is not None:
        factors = _rope_factors(config)
        writer.add_tensor("rope_freqs.weight", factors, raw_dtype=library.GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _kind(config: DecoderConfig) -> str:
    """Returns llama.cpp's name of the architecture; raises ValueError for one that it would run otherwise."""
    e, kind = config.experts, model_type(config)
    if (found := _KINDS.get(kind)) is None:
        raise ValueError(f"--quantize gguf writes {', '.join(_KINDS)}, not {kind}; use --quantize mxfp4")
    others = {
        "biases": config.qkv_bias or config.out_bias,
        "YaRN": config.yarn,
        "windows": config.windows,
        f"blocks without experts, which llama.cpp's {found} lacks": config.dense_d_ff,
        "routers whose weights are not renormalized": e is not None and not e.renormalized,
        "Llama 3's rope scaling in Qwen3": found == "qwen3moe" and config.rope_scaling,
    }
    if parts := [name for name, holds in others.items() if holds]:
        raise ValueError(f"--quantize gguf does not write {' and '.join(parts)}; use --quantize mxfp4")
    return found


def _tensors(
    types: Any, config: DecoderConfig, params: decoder.Params, operands: Mapping[str, Operand]
) -> Iterator[tuple[str, np.ndarray, Any]]:
    """Yields each tensor's name by Hugging Face, without `.weight`, its bytes or float32 values, and type."""
    packed = set(names_of(config, operands))
    for name, view in progress(views(config, params), "exporting"):
        module = name.removesuffix(".weight")
        if module in packed:
            continue
        value, dtype = view.reshape(shape_of(name, view)), types.F32
        if value.ndim > 1 and not module.endswith(".gate"):  # llama.cpp routes in float32
            value, dtype = _interleaved(config, module, value).astype(ml_dtypes.bfloat16), types.BF16
            value = np.ascontiguousarray(value).view(np.uint8)
        yield module, np.ascontiguousarray(value), dtype
    for module, weight in quantized_weights(config, params, operands):
        codes, scales = (_interleaved(config, module, part) for part in (weight.codes, weight.scales))
        yield module, blocks_of(QuantizedWeight(codes, scales)), types.MXFP4


def blocks_of(weight: QuantizedWeight) -> np.ndarray:
    """Returns ggml's blocks, uint8 [out, 17 * in / 32]."""
    rows = len(weight.codes)
    halves = weight.codes.reshape(rows, -1, 2, BLOCK // 2)
    nibbles = halves[:, :, 0] | (halves[:, :, 1] << 4)
    return np.concatenate([weight.scales[..., None], nibbles], axis=-1).reshape(rows, -1)


def _interleaved(config: DecoderConfig, module: str, value: np.ndarray) -> np.ndarray:
    """Returns rows in llama.cpp's order: in a Llama's head of query or key, i + H / 2 follows channel i."""
    if _kind(config) != "llama" or not module.endswith(("q_proj", "k_proj")):
        return value
    return value.reshape(-1, 2, config.head_dim // 2, value.shape[-1]).swapaxes(1, 2).reshape(value.shape)


def _rope_factors(config: DecoderConfig) -> np.ndarray:
    """Returns the divisor of each pair of channels' frequency, float32 [H / 2]."""
    plain = dataclasses.replace(config, rope_scaling=None)
    position = jnp.ones((1, 1), jnp.int32)
    first, scaled = (np.asarray(jax.device_get(rope_angles(position, c)))[0, 0] for c in (plain, config))
    return (first / scaled).astype(np.float32)


def _gguf_name(module: str) -> str:
    if module in _OTHER_NAMES:
        return f"{_OTHER_NAMES[module]}.weight"
    _, _, block, rest = module.split(".", 3)
    _, is_expert, expert = rest.partition(".experts.")
    name = _EXPERT_NAMES[expert.partition(".")[2]] if is_expert else _NAMES[rest]
    return f"blk.{block}.{name}.weight"


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
    if (e := config.experts) is not None:
        writer.add_expert_count(e.n)
        writer.add_expert_used_count(e.active)
        writer.add_expert_feed_forward_length(config.d_ff)
    for which in ("bos", "eos"):
        token = raw.get(f"{which}_token_id")
        if (token := token[0] if isinstance(token, list) and token else token) is not None:
            getattr(writer, f"add_{which}_token_id")(token)


def _vocabulary(folder: pathlib.Path, vocab_size: int) -> dict[str, Any]:
    """Returns the metadata of a folder's byte-level BPE tokenizer, by the names of the writer's methods.

    Raises:
      ValueError: there is no tokenizer, or it is of another kind.
    """
    path = folder / "tokenizer.json"
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
    template = _chat_template(folder)
    return ({} if template is None else {"chat_template": template}) | {
        "tokenizer_model": "gpt2",
        "tokenizer_pre": pre,
        "add_bos_token": _adds_bos(raw.get("post_processor")),
        "token_list": list(words),
        "token_types": list(kinds),
        "token_merges": merges,
    }


def _adds_bos(post: Any) -> bool:
    """Whether a tokenizer's post-processor puts a special token before a text."""
    steps = (post or {}).get("processors", [post or {}])
    return any("SpecialToken" in step["single"][0] for step in steps if step.get("single"))


def _chat_template(folder: pathlib.Path) -> str | None:
    if (file := folder / "chat_template.jinja").exists():
        return file.read_text()
    path = folder / "tokenizer_config.json"
    found = json.loads(path.read_bytes()).get("chat_template") if path.exists() else None
    return found if isinstance(found, str) else None
