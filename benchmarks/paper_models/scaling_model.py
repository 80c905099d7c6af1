"""The cost model of a training step on many devices: seconds and bytes of one device, by arithmetic alone.

A mesh is data x fsdp x tensor, as in train.py. `fsdp` shards weights, gradients and optimizer state. Each
shard of a layer's weights is quantized locally and gathered as an operand, in the forward pass for Fprop and
in the backward pass for Dgrad. `tensor` shards heads and the MLP's width. `seconds` says what may overlap.
"""

import dataclasses
from typing import Any

from benchmarks.paper_models.roofline import OPERAND_BYTES, gemm_bytes, kind_of, pass_bytes
from benchmarks.paper_models.scaling_machines import Machine
from models.configs import LlamaConfig
from models.loss import LOSS_TOKENS
from mxjax.kernels.shapes import Linears, gemms, tensors

OVERLAP = 0.8
"""Fraction of the computing time that can hide collectives over `fsdp` and `data`."""
GRADIENT_BYTES = 4
"""Bytes an element of a weight's gradient, which is reduced in float32."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The distribution of a step.

    Attributes:
      data, fsdp, tensor: the mesh.
      sequences: sequences in a step on all devices.
      micro: sequences in a microbatch of a tensor group.
      remat: whether blocks are recomputed in the backward pass.
    """

    data: int
    fsdp: int
    tensor: int
    sequences: int
    micro: int
    seq: int = 8192
    remat: bool = True

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return self.data * self.fsdp * self.tensor

    @property
    def times(self) -> int:
        """Microbatches of a tensor group in a step."""
        return self.sequences // (self.data * self.fsdp * self.micro)

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch."""
        return self.micro * self.seq


def linears(model: LlamaConfig, tensor: int) -> Linears:
    """Returns the (d_in, d_out) of a device's shard of a block's linear layers."""
    inner = model.n_heads * model.head_dim
    return {
        "attention.qkv": (model.d_model, model.qkv_size // tensor),
        "attention.out": (inner // tensor, model.d_model),
        "mlp.gate_up": (model.d_model, 2 * model.d_ff // tensor),
        "mlp.down": (model.d_ff // tensor, model.d_model),
    }


def gemm_seconds(model: LlamaConfig, policy: str, machine: Machine, plan: Plan) -> float:
    """Returns the time of a microbatch's linear layers; remat runs Fprop twice, except mlp.down's."""
    total = 0.0
    for shape in gemms(plan.tokens, linears(model, plan.tensor)):
        layer, use = shape.name.rsplit(".", 1)
        kind = kind_of(policy, use)
        matrix = 2 * shape.m * shape.n * shape.k / machine.gemm[kind]
        runs = 2 if plan.remat and use == "fprop" and layer != "mlp.down" else 1
        total += runs * max(matrix, gemm_bytes(shape, kind) / machine.memory)
    return model.n_layers * total


def quantize_seconds(model: LlamaConfig, policy: str, machine: Machine, plan: Plan) -> float:
    """Returns the time to quantize a microbatch's operands; each device quantizes its shard of the weights.

    Remat quantizes activations and weights twice. Memory limits these passes.
    """
    kind, total = kind_of(policy, "fprop"), 0.0
    for tensor in tensors(plan.tokens, linears(model, plan.tensor)):
        moved = pass_bytes(tensor, kind)
        if machine.carried and kind == "mxfp4":  # both operands are read packed and written in FP8
            moved += 2 * (OPERAND_BYTES["mxfp4"] + OPERAND_BYTES["fp8"]) * tensor.rows * tensor.columns
        what = tensor.name.rsplit(".", 1)[-1]
        shards = plan.fsdp if what == "weight" else 1
        runs = 2 if plan.remat and what != "gradient" else 1
        total += runs * moved / shards
    return model.n_layers * total / machine.memory


def compute_parts(model: LlamaConfig, policy: str, machine: Machine, plan: Plan) -> dict[str, float]:
    """Returns the seconds in which a device computes in a step, by part."""
    t, again = plan.tensor, plan.remat
    inner = model.n_heads * model.head_dim
    # A product of causal attention takes S^2 d FLOPs a sequence; two forward, five backward.
    attention = (9 if again else 7) * plan.seq * plan.tokens * inner / t * model.n_layers
    head = 6 * plan.tokens * model.d_model * model.vocab_size / t
    # Elements read and written a token by norms and residual sums, by RoPE and by the gated MLP.
    rope = 2 * (model.n_heads + model.n_kv_heads) * model.head_dim
    forward = 10 * model.d_model + (rope + 3 * model.d_ff) / t
    backward = 12 * model.d_model + (rope + 5 * model.d_ff) / t
    moved = 2 * plan.tokens * model.n_layers * ((2 if again else 1) * forward + backward)
    each = {
        "gemms": gemm_seconds(model, policy, machine, plan),
        "quantization": quantize_seconds(model, policy, machine, plan),
        "attention": attention / machine.attention,
        "head": head / machine.gemm["bf16"],
        "elementwise": moved / machine.memory,
    }
    # float32: gradient, weight, two moments read; the last three written; the gradient read for its norm.
    optimizer = 32 * model.n_params / (plan.fsdp * t) / machine.memory
    return {name: plan.times * time for name, time in each.items()} | {"optimizer": optimizer}


def gather_seconds(size: float, group: int, stride: int, machine: Machine) -> float:
    """Returns the time to all-gather, or reduce-scatter, `size` bytes over a group of devices.

    The group has every `stride`-th device. Traffic within a node takes the fast links; each node receives
    the others' data through its members' network cards. Both run at once, in rings.
    """
    if group == 1:
        return 0.0
    inside = min(group, max(machine.node // stride, 1))
    nodes = group // inside
    within = (group - 1) / group * size / machine.fast if inside > 1 else 0.0
    between = (nodes - 1) / nodes * size / (inside * machine.slow)
    return max(within, between) + (nodes - 1) * machine.latency


def traffic_parts(model: LlamaConfig, policy: str, machine: Machine, plan: Plan) -> dict[str, float]:
    """Returns the seconds of a step's collectives: over fsdp, data and tensor."""
    block = sum(d_in * d_out for d_in, d_out in linears(model, plan.tensor).values())
    head = model.vocab_size * model.d_model / plan.tensor
    uses = ["fprop", "dgrad", *(["fprop"] if plan.remat else [])]

    def gather(size: float) -> float:
        return gather_seconds(size, plan.fsdp, plan.tensor, machine)

    layer = sum(gather(block * OPERAND_BYTES[kind_of(policy, use)]) for use in uses)
    layer += gather(block * GRADIENT_BYTES)
    ends = gather(head * OPERAND_BYTES["bf16"]) + gather(head * GRADIENT_BYTES)
    own = GRADIENT_BYTES * model.n_params / (plan.fsdp * plan.tensor)
    data = 2 * gather_seconds(own, plan.data, plan.fsdp * plan.tensor, machine)
    # A sum over the tensor group after attention.out and mlp.down, and of their inputs' gradients.
    sums = (
        (5 if plan.remat else 4)
        * 2
        * gather_seconds(2.0 * plan.tokens * model.d_model, plan.tensor, 1, machine)
    )
    each = {"fsdp": model.n_layers * layer + ends, "data": data, "tensor": model.n_layers * sums}
    return {name: plan.times * time for name, time in each.items()}


def seconds(parts: dict[str, float], overlap: float = OVERLAP) -> float:
    """Returns a step's time if collectives over fsdp and data hide behind `overlap` of the computing."""
    hidden = parts["fsdp"] + parts["data"]
    compute = sum(parts.values()) - hidden - parts["tensor"]
    return compute + parts["tensor"] + max(0.0, hidden - overlap * compute)


def step_parts(model: LlamaConfig, policy: str, machine: Machine, plan: Plan) -> dict[str, float]:
    """Returns the seconds of all parts of a step on one device."""
    return compute_parts(model, policy, machine, plan) | traffic_parts(model, policy, machine, plan)


def memory_bytes(model: LlamaConfig, policy: str, plan: Plan) -> dict[str, float]:
    """Returns a device's peak memory: state, gathered layers and head, activations, logits.

    This is a lower bound: XLA's own buffers are known only after compiling.
    """
    t, tokens = plan.tensor, plan.tokens
    block = sum(d_in * d_out for d_in, d_out in linears(model, t).values())
    operand = OPERAND_BYTES[kind_of(policy, "wgrad")]
    inner = model.n_heads * model.head_dim
    # In bfloat16: the residual stream twice, q, k, v, attention's result, gate and up; operands of Wgrad.
    kept = 2 * (2 * model.d_model + (model.qkv_size + inner + 2 * model.d_ff) / t)
    kept += operand * (2 * model.d_model + (inner + model.d_ff) / t)
    of_layers = kept + 2 * model.d_model * model.n_layers if plan.remat else kept * model.n_layers
    gathered = 2 * block * sum(OPERAND_BYTES[kind_of(policy, use)] for use in ("fprop", "dgrad"))
    # The head gathered over fsdp (`models.loss`): bfloat16, its gradient and, without `tensor`, float32.
    whole_head = 10 if t == 1 and plan.data * plan.fsdp > 1 else 6 if plan.fsdp > 1 else 0
    # float32: weights, two moments, gradients, and their sum over a step's parts.
    each = 20 if plan.times > 1 else 16
    return {
        "state": each * model.n_params / (plan.fsdp * t),
        "gathered": (gathered + GRADIENT_BYTES * block if plan.fsdp > 1 else 0.0),
        "head": whole_head * model.vocab_size * model.d_model / t,
        "activations": tokens * of_layers,
        "logits": 3 * 4 * min(LOSS_TOKENS, tokens) * model.vocab_size / t,
    }


def describe(model: LlamaConfig, policy: str, machine: Machine, plan: Plan) -> dict[str, Any]:
    """Returns a plan's times, speed and memory, and whether it fits."""
    parts, memory = step_parts(model, policy, machine, plan), memory_bytes(model, policy, plan)
    tokens, time = plan.sequences * plan.seq, seconds(parts)
    flops = tokens * model.flops_per_token(plan.seq) / time / plan.devices
    return {
        "policy": policy,
        "plan": dataclasses.asdict(plan),
        "parts": parts,
        "step_seconds": time,
        "step_seconds_no_overlap": seconds(parts, 0.0),
        "tokens_per_s_per_device": tokens / time / plan.devices,
        "mfu": flops / machine.peak,
        "memory_bytes": memory,
        "fits": fits(memory, machine),
    }


def fits(memory: dict[str, float], machine: Machine) -> bool:
    """Whether it takes at most nine tenths of the memory."""
    return sum(memory.values()) <= 0.9 * machine.capacity


def best_plan(
    model: LlamaConfig, policy: str, machine: Machine, devices: int, sequences: int, seq: int = 8192
) -> Plan | None:
    """Returns the fastest plan that fits, or None; all sizes but `devices` are powers of two."""
    found = []
    for tensor in (1, 2, 4, 8):
        for fsdp in _powers(devices // tensor):
            data, rest = divmod(devices, fsdp * tensor)
            share, uneven = divmod(sequences, data * fsdp) if data else (0, 1)
            if rest or uneven or model.n_kv_heads % tensor:
                continue
            for micro in _powers(min(share, 16)):
                for remat in (False, True):
                    plan = Plan(data, fsdp, tensor, sequences, micro, seq, remat)
                    if fits(memory_bytes(model, policy, plan), machine):
                        found.append((seconds(step_parts(model, policy, machine, plan)), len(found), plan))
    return min(found)[2] if found else None


def _powers(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length())]
