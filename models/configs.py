"""Llama configurations by name, each with its source and the vocabulary of its own tokenizer."""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's frequency scaling: wavelengths past the original context are stretched by `factor`.

    Source: meta-llama/llama-models, `apply_scaling`.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama. Sizes count elements; `d_ff` is the width of the gated MLP."""

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    init_std: float = 0.02
    tied: bool = False  # the head is the embedding, transposed

    def __post_init__(self):
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {self.n_heads} must be a multiple of n_kv_heads {self.n_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even for rotary embeddings")

    @property
    def qkv_size(self) -> int:
        """The width of the fused query, key and value projection."""
        return (self.n_heads + 2 * self.n_kv_heads) * self.head_dim

    @property
    def n_params(self) -> int:
        """The number of parameters."""
        block = self.d_model * (self.qkv_size + self.n_heads * self.head_dim + 3 * self.d_ff + 2)
        embeddings = self.vocab_size * self.d_model * (1 if self.tied else 2)
        return self.n_layers * block + embeddings + self.d_model

    def flops_per_token(self, seq_len: int) -> float:
        """Returns the training FLOPs of a token: 6 per parameter, and 6 S N H per layer for attention.

        S is `seq_len`, N the number of heads and H their size. The embedding lookup does not count, but a
        tied embedding counts as the head. Recomputation by `remat` does not count.

        Source: arXiv 2204.02311, appendix B; the causal mask removes half of the attention products.
        """
        matrices = self.n_params - self.vocab_size * self.d_model * (0 if self.tied else 1)
        return 6.0 * matrices + 6.0 * self.n_layers * self.n_heads * self.head_dim * seq_len


_LLAMA_31 = RopeScaling()
_LLAMA_32 = RopeScaling(factor=32.0)

CONFIGS: Mapping[str, LlamaConfig] = types.MappingProxyType(
    {
        # The default, our own: bytes as tokens; trains on two CPU cores in about a minute.
        "tiny": LlamaConfig(257, 128, 4, 4, 2, 32, 384, rope_theta=10_000.0),
        # GaLore's Llamas (arXiv 2403.03507, configs/llama_{20,60,350}m.json) with its norm_eps of 1e-6.
        "20m": LlamaConfig(32_000, 256, 4, 4, 4, 64, 688, rope_theta=10_000.0, norm_eps=1e-6),
        "60m": LlamaConfig(32_000, 512, 8, 8, 8, 64, 1376, rope_theta=10_000.0, norm_eps=1e-6),
        # GPT-3 Small's shape (arXiv 2005.14165, table 2.1) with a Llama's gated MLP of the same size.
        "125m": LlamaConfig(32_000, 768, 12, 12, 12, 64, 2048, rope_theta=10_000.0),
        # GaLore's again.
        "350m": LlamaConfig(32_000, 1024, 24, 16, 16, 64, 2736, rope_theta=10_000.0, norm_eps=1e-6),
        # Meta's model cards: Llama 3.2 1B (tied) and Llama 3.1 (arXiv 2407.21783, table 3).
        "llama3.2-1b": LlamaConfig(128_256, 2048, 16, 32, 8, 64, 8192, rope_scaling=_LLAMA_32, tied=True),
        "llama3.1-8b": LlamaConfig(128_256, 4096, 32, 32, 8, 128, 14_336, rope_scaling=_LLAMA_31),
        "llama3.1-70b": LlamaConfig(128_256, 8192, 80, 64, 8, 128, 28_672, rope_scaling=_LLAMA_31),
        "llama3.1-405b": LlamaConfig(128_256, 16_384, 126, 128, 8, 128, 53_248, rope_scaling=_LLAMA_31),
    }
)


def get_config(name: str) -> LlamaConfig:
    """Returns the configuration called `name`.

    Raises:
      ValueError: there is no such configuration; the message lists all.
    """
    if name not in CONFIGS:
        raise ValueError(f"unknown model {name!r}; the models are {', '.join(CONFIGS)}")
    return CONFIGS[name]


def name_of(config: LlamaConfig) -> str:
    """Returns the name of a configuration, or "other"."""
    return next((name for name, known in CONFIGS.items() if known == config), "other")


def to_dict(config: LlamaConfig) -> dict[str, Any]:
    """Returns the configuration as nested dicts for JSON, with the number of parameters."""
    return dataclasses.asdict(config) | {"parameters": config.n_params}
