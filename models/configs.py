"""Configurations of decoders by name, each with its source and the vocabulary of its own tokenizer."""

import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's frequency scaling: wavelengths past the original context are stretched by `factor`.

    Source: meta-llama/llama-models, `apply_scaling`.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self):
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor must be less than high_freq_factor {self.high_freq_factor}, got "
                f"{self.low_freq_factor}"
            )


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN's frequency scaling: pairs of channels that turn less than `beta_slow` times in the original
    context are slowed down by `factor`, those that turn more than `beta_fast` times are not, and others are
    interpolated.

    `truncate` rounds the interpolated range to whole pairs. Rotated queries and keys are multiplied by
    `attention_factor`; None is 0.1 ln(factor) + 1.

    Source: arXiv 2309.00071; transformers 5.23, modeling_rope_utils.py.
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None

    def __post_init__(self):
        if self.beta_slow > self.beta_fast:
            raise ValueError(f"beta_slow must be at most beta_fast {self.beta_fast}, got {self.beta_slow}")


@dataclasses.dataclass(frozen=True)
class ClampedSwiGLU:
    """gpt-oss's activation: min(gate, limit) sigmoid(alpha gate) (up + 1), where up is within +- limit.

    The sigmoid takes the clamped gate too. Source: transformers 5.23, modeling_gpt_oss.py.
    """

    alpha: float = 1.702
    limit: float = 7.0


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """The experts in place of a block's MLP, which have the width `d_ff` each, and their router.

    Attributes:
      n: experts.
      active: experts of a token, those with the highest scores.
      scores: function of the router's logits.
      renormalized: whether the scores of a token's experts, which weigh their results, are made to sum to 1.
      shared: experts that every token has besides; None is none.
      biased: whether router and experts have biases, as gpt-oss's do.
      clamped: the experts' activation; None is SwiGLU.
      balance_loss: coefficient of the load-balancing loss; None is none.
      z_loss: coefficient of the router's z-loss; None is none.
      balance_rate: step of the biases that balance the load without a loss; None is none.
    """

    n: int
    active: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    renormalized: bool = True
    shared: int | None = None
    biased: bool = False
    clamped: ClampedSwiGLU | None = None
    balance_loss: float | None = None
    z_loss: float | None = None
    balance_rate: float | None = None

    def __post_init__(self):
        if self.active > self.n:
            raise ValueError(f"active {self.active} must be at most the {self.n} experts")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder, and its parts. Sizes count elements.

    Attributes:
      d_ff: width of the gated MLP, or of each expert.
      tied: whether the head is the embedding, transposed.
      qkv_bias, out_bias: whether attention's projections have biases.
      qk_norm: whether each query and key has a norm over its head, before the rotation.
      sinks: whether each head has a logit that joins the softmax of every query, without a value.
      windows: tokens that a query sees, itself included, in each block; 0 is all. Empty is 0 in all blocks.
      experts: in place of each block's MLP.
      dense_d_ff: width of the gated MLP that a block has in place of experts; 0 is experts. Empty is 0 in
        all blocks.
      rope_layers: 1 in each block that rotates queries and keys by their positions, 0 in one that does not
        (NoPE). Empty is 1 in all blocks.
    """

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
    tied: bool = False
    yarn: Yarn | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    windows: tuple[int, ...] = ()
    experts: ExpertsConfig | None = None
    dense_d_ff: tuple[int, ...] = ()
    rope_layers: tuple[int, ...] = ()

    def __post_init__(self):
        for name in ("windows", "dense_d_ff", "rope_layers"):
            if (given := len(getattr(self, name))) not in (0, self.n_layers):
                raise ValueError(f"{name} must have n_layers {self.n_layers} entries, got {given}")
        widths = {*self.dense_d_ff}
        if widths and not (self.experts and 0 in widths and len(widths) == 2):
            raise ValueError(
                "dense_d_ff must be 0 in the blocks with experts and one width in the others, and there must "
                f"be both, got {self.dense_d_ff}"
            )
        if self.rope_layers and {*self.rope_layers} not in ({0}, {0, 1}):
            raise ValueError(
                f"rope_layers must be 0 or 1 in each block, 0 in one at least, got {self.rope_layers}"
            )
        if self.rope_scaling and self.yarn:
            raise ValueError("rope_scaling and yarn both scale the rotary frequencies: give one of them")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {self.n_heads} must be a multiple of n_kv_heads {self.n_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even for rotary embeddings")

    @property
    def n_dense(self) -> int:
        """The number of blocks with an MLP in a decoder that has experts."""
        return sum(width > 0 for width in self.dense_d_ff)

    def block(self, i: int) -> "DecoderConfig":
        """Returns the configuration of a decoder whose blocks all have block i's MLP, or its experts."""
        if not self.dense_d_ff:
            return self
        dense = {"experts": None, "d_ff": self.dense_d_ff[i]} if self.dense_d_ff[i] else {}
        return dataclasses.replace(self, dense_d_ff=(), **dense)

    @property
    def qkv_size(self) -> int:
        """The width of the fused query, key and value projection."""
        return (self.n_heads + 2 * self.n_kv_heads) * self.head_dim

    @property
    def mlp_size(self) -> int:
        """The number of parameters of a block's MLP, or of its experts and their router if there are any."""
        if (e := self.experts) is None:
            return 3 * self.d_model * self.d_ff
        biases = e.n * (2 * self.d_ff + self.d_model + 1) if e.biased else 0
        router = (self.d_model + (1 if e.balance_rate else 0)) * e.n
        return 3 * self.d_model * self.d_ff * (e.n + (e.shared or 0)) + router + biases

    @property
    def n_params(self) -> int:
        """The number of parameters."""
        inner = self.n_heads * self.head_dim
        block = self.d_model * (self.qkv_size + inner + 2) + self.mlp_size
        block += self.qkv_size * self.qkv_bias + self.d_model * self.out_bias
        block += 2 * self.head_dim * self.qk_norm + self.n_heads * self.sinks
        embeddings = self.vocab_size * self.d_model * (1 if self.tied else 2)
        dense = self.n_dense * (3 * self.d_model * max(self.dense_d_ff, default=0) - self.mlp_size)
        return self.n_layers * block + dense + embeddings + self.d_model

    @property
    def n_expert_params(self) -> int:
        """The number of parameters of all experts' matrices."""
        layers = self.n_layers - self.n_dense
        return 0 if self.experts is None else 3 * layers * self.d_model * self.d_ff * self.experts.n

    @property
    def n_active_params(self) -> int:
        """The number of parameters that a token meets: without those of experts that it does not have."""
        e = self.experts
        return self.n_params - (self.n_expert_params * (e.n - e.active) // e.n if e else 0)

    def flops_per_token(self, seq_len: int, frozen: bool = False) -> float:
        """Returns the training FLOPs of a token: 6 per active parameter, and 6 S N H per layer for attention.

        Frozen parameters have no Wgrad, so 4 each; their adapters, about 1 % as many, do not count.

        S is `seq_len`, N the number of heads and H their size. The embedding lookup does not count, but a
        tied embedding counts as the head. Recomputation by `remat` does not count. With a window W, S counts
        as 2 W - W**2 / S, twice the mean number of tokens that a query sees.

        Source: arXiv 2204.02311, appendix B; the causal mask removes half of the attention products.
        """
        matrices = self.n_active_params - self.vocab_size * self.d_model * (0 if self.tied else 1)
        seen = [min(window or seq_len, seq_len) for window in self.windows or (0,) * self.n_layers]
        lengths = sum(2 * w - w * w / seq_len for w in seen)
        return (4.0 if frozen else 6.0) * matrices + 6.0 * self.n_heads * self.head_dim * lengths


_LLAMA_31 = RopeScaling()
_LLAMA_32 = RopeScaling(factor=32.0)
_experts = functools.partial(ExpertsConfig, balance_loss=0.01, z_loss=1e-3)  # ST-MoE's, arXiv 2202.08906
_qwen3 = functools.partial(DecoderConfig, rope_theta=1_000_000.0, norm_eps=1e-6, qk_norm=True)

CONFIGS: Mapping[str, DecoderConfig] = types.MappingProxyType(
    {
        # The default, our own: bytes as tokens; trains on two CPU cores in about a minute.
        "tiny": DecoderConfig(257, 128, 4, 4, 2, 32, 384, rope_theta=10_000.0),
        # GaLore's Llamas (arXiv 2403.03507, configs/llama_{20,60,350}m.json) with its norm_eps of 1e-6.
        "20m": DecoderConfig(32_000, 256, 4, 4, 4, 64, 688, rope_theta=10_000.0, norm_eps=1e-6),
        "60m": DecoderConfig(32_000, 512, 8, 8, 8, 64, 1376, rope_theta=10_000.0, norm_eps=1e-6),
        # GPT-3 Small's shape (arXiv 2005.14165, table 2.1) with a Llama's gated MLP of the same size.
        "125m": DecoderConfig(32_000, 768, 12, 12, 12, 64, 2048, rope_theta=10_000.0),
        # GaLore's again.
        "350m": DecoderConfig(32_000, 1024, 24, 16, 16, 64, 2736, rope_theta=10_000.0, norm_eps=1e-6),
        # Meta's model cards: Llama 3.2 1B (tied) and Llama 3.1 (arXiv 2407.21783, table 3).
        "llama3.2-1b": DecoderConfig(128_256, 2048, 16, 32, 8, 64, 8192, rope_scaling=_LLAMA_32, tied=True),
        "llama3.1-8b": DecoderConfig(128_256, 4096, 32, 32, 8, 128, 14_336, rope_scaling=_LLAMA_31),
        "llama3.1-70b": DecoderConfig(128_256, 8192, 80, 64, 8, 128, 28_672, rope_scaling=_LLAMA_31),
        "llama3.1-405b": DecoderConfig(128_256, 16_384, 126, 128, 8, 128, 53_248, rope_scaling=_LLAMA_31),
        # Qwen's config.json files of Qwen3-0.6B (tied), Qwen3-8B and Qwen3-30B-A3B.
        "qwen3-0.6b": _qwen3(151_936, 1024, 28, 16, 8, 128, 3072, tied=True),
        "qwen3-8b": _qwen3(151_936, 4096, 36, 32, 8, 128, 12_288),
        "qwen3-30b-a3b": _qwen3(
            151_936, 2048, 48, 32, 4, 128, 768, experts=ExpertsConfig(128, 8, balance_loss=1e-3)
        ),
        # Mistral AI's: Mistral-7B-v0.1 and Mixtral-8x7B-v0.1.
        "mistral-7b": DecoderConfig(
            32_000, 4096, 32, 32, 8, 128, 14_336, rope_theta=10_000.0, windows=(4096,) * 32
        ),
        "mixtral-8x7b": DecoderConfig(
            *(32_000, 4096, 32, 32, 8, 128, 14_336),
            rope_theta=1_000_000.0,
            experts=ExpertsConfig(8, 2, balance_loss=0.02),
        ),
        # OpenAI's gpt-oss-20b.
        "gpt-oss-20b": DecoderConfig(
            *(201_088, 2880, 24, 64, 8, 64, 2880),
            rope_theta=150_000.0,
            yarn=Yarn(32.0, 4096, truncate=False),
            qkv_bias=True,
            out_bias=True,
            sinks=True,
            windows=(128, 0) * 12,
            experts=ExpertsConfig(32, 4, biased=True, clamped=ClampedSwiGLU(), balance_loss=0.9),
        ),
        # Our own. "moe-tiny" is "tiny" with eight experts of a quarter of its width, two a token; trains on
        # two CPU cores in less than two minutes.
        "moe-tiny": DecoderConfig(257, 128, 4, 4, 2, 32, 96, rope_theta=10_000.0, experts=_experts(8, 2)),
        # "60m" with experts of half its width: the same products a token. With 64 narrow experts it has about
        # as many parameters.
        "moe-100m": DecoderConfig(
            *(32_000, 512, 8, 8, 8, 64, 688), rope_theta=10_000.0, norm_eps=1e-6, experts=_experts(8, 2)
        ),
        "moe-100m-64": DecoderConfig(
            *(32_000, 512, 8, 8, 8, 64, 96), rope_theta=10_000.0, norm_eps=1e-6, experts=_experts(64, 4)
        ),
        # Llama 3.2 1B's attention and experts of 3584: 1.0 billion of 3.1 billion parameters a token.
        "moe-1b": DecoderConfig(
            32_000, 2048, 16, 32, 8, 64, 3584, rope_theta=10_000.0, experts=_experts(8, 2)
        ),
    }
)


def get_config(name: str) -> DecoderConfig:
    """Returns the configuration called `name`.

    Raises:
      ValueError: there is no such configuration; the message lists all.
    """
    if name not in CONFIGS:
        raise ValueError(f"unknown model {name!r}; the models are {', '.join(CONFIGS)}")
    return CONFIGS[name]


def name_of(config: DecoderConfig) -> str:
    """Returns the name of a configuration, or "other"."""
    return next((name for name, known in CONFIGS.items() if known == config), "other")


def to_dict(config: DecoderConfig) -> dict[str, Any]:
    """Returns the configuration as nested dicts for JSON, with the number of parameters."""
    return dataclasses.asdict(config) | {"parameters": config.n_params}
