"""The roofline for MI355X: seconds of the parts of a Llama 3.1 8B training step, from rates and builds."""

from benchmarks.paper_models.mi355x_builds import find_quantizer, vector_per_element
from benchmarks.paper_models.mi355x_rates import HBM, PEAK, VECTOR_RATE, Case, gemm_seconds
from benchmarks.paper_models.roofline import kind_of, pass_bytes
from models.configs import get_config
from mxjax.kernels import shapes

POLICIES = ("bf16", "fp8", "wgrad_hadamard", "full_hadamard")
MODEL = get_config("llama3.1-8b")
SEQUENCE = 8192
DEVICES = 8  # over which the optimizer's state is sharded


def quantize_seconds(
    tensor: shapes.TensorShape, policy: str, builds: list[dict], case: Case
) -> tuple[float, str]:
    """Returns the larger of the times to move bytes and to issue vector instructions, and its name."""
    kind = kind_of(policy, "fprop")
    memory = pass_bytes(tensor, kind, case.fp8_reads) / (HBM * case.memory)
    vector = 0.0
    if kind == "mxfp4":
        per_element = vector_per_element(find_quantizer(builds, tensor, policy))
        vector = per_element * tensor.rows * tensor.columns / VECTOR_RATE
    return max((memory, "HBM"), (vector, "vector"))


def block_seconds(policy: str, tokens: int, builds: list[dict], case: Case) -> dict[str, float]:
    """Returns the times of the four linear layers of one block, forward and backward."""
    gemms = sum(
        gemm_seconds(s, kind_of(policy, s.name.split(".")[-1]), case)[0] for s in shapes.gemms(tokens)
    )
    passes = sum(quantize_seconds(t, policy, builds, case)[0] for t in shapes.tensors(tokens))
    return {"gemms": gemms, "quantization": passes}


def other_seconds(tokens: int, case: Case) -> dict[str, float]:
    """Returns the times that no policy changes: attention, head, passes over memory, optimizer."""
    m = MODEL
    # A product of causal attention takes S^2 d FLOPs a sequence; two products forward, five backward.
    attention = 7 * SEQUENCE * tokens * m.n_heads * m.head_dim * m.n_layers
    head = 6 * tokens * m.d_model * m.vocab_size
    d, f, rope = m.d_model, m.d_ff, 2 * (m.n_heads + m.n_kv_heads) * m.head_dim
    # Elements read and written a token by norms, residual sums, RoPE and the gated MLP, forward and backward.
    moved = (4 * d + 6 * d + rope + 3 * f) + (6 * d + 6 * d + rope + 5 * f)
    return {
        "attention": attention / (PEAK["bf16"] * case.attention),
        "head": head / (PEAK["bf16"] * case.gemm["bf16"]),
        "elementwise": 2 * moved * tokens * m.n_layers / (HBM * case.memory),
        # float32: gradient, weight, two moments read; the last three written; the gradient read for its norm.
        "optimizer": 32 * m.n_params / DEVICES / (HBM * case.memory),
    }


def step_seconds(policy: str, tokens: int, builds: list[dict], case: Case) -> dict[str, float]:
    """Returns the times of the parts of a training step."""
    block = block_seconds(policy, tokens, builds, case)
    return {name: time * MODEL.n_layers for name, time in block.items()} | other_seconds(tokens, case)


def gain(policy: str, tokens: int, builds: list[dict], case: Case, block: bool = False) -> float:
    """Returns a policy's gain in steps, or in blocks' linear layers, per second over fp8."""
    seconds = block_seconds if block else step_seconds
    fp8, other = (sum(seconds(p, tokens, builds, case).values()) for p in ("fp8", policy))
    return fp8 / other - 1
