"""Measures training steps of transformers' Llama in PyTorch; `benchmarks.train_speed` starts the process.

Dimensions, tokens, AdamW and clipping are ours; attention is SDPA, AdamW is fused, and torch.compile compiles
the model. Precisions: "autocast" has float32 weights and bfloat16 products, as ours; "bf16" has everything in
bfloat16. On several devices FSDP2 shards each decoder layer, and each layer is compiled by itself.
"""

import contextlib
import json
import os
import pathlib
import time
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from benchmarks import train_worker
from benchmarks.train_worker import Job
from models.configs import get_config
from models.huggingface.config import write_config

ON_GPU = torch.cuda.is_available()


class Peer(nn.Module):
    """transformers' Llama and its loss."""

    def __init__(self, job: Job):
        super().__init__()
        config = transformers.LlamaConfig(**write_config(get_config(job.model), job.seq))
        config._attn_implementation = "sdpa"
        self.llama = transformers.LlamaForCausalLM(config)
        self.rows = job.rows if job.loss == "chunked" else None

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the mean cross-entropy; "whole" is transformers' own loss."""
        if self.rows is None:
            output = self.llama(input_ids=tokens, labels=targets, shift_labels=targets, use_cache=False)
            return output.loss
        x = self.llama.model(input_ids=tokens, use_cache=False).last_hidden_state.flatten(0, 1)
        chunks = zip(x.split(self.rows), targets.flatten().split(self.rows), strict=True)
        total = sum(checkpoint(self.chunk_loss, *chunk, use_reentrant=False) for chunk in chunks)
        return total / targets.numel()

    def chunk_loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the sum of some tokens' cross-entropies."""
        logits = self.llama.lm_head(x).float()
        return nn.functional.cross_entropy(logits, targets, reduction="sum")


def build(job: Job, device: torch.device) -> tuple[Peer, Any]:
    """Returns the model with random weights, sharded over several devices, and the function to call."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if job.subject == "bf16" else torch.float32)
    with device:
        peer = Peer(job).train()
    torch.set_default_dtype(torch.float32)
    layers = peer.llama.model.layers
    if job.remat != "none":
        for i, layer in enumerate(layers):
            layers[i] = checkpoint_wrapper(layer)
    if job.devices == 1:
        return peer, torch.compile(peer)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = dist.init_device_mesh(device.type, (job.devices,))
    for i, layer in enumerate(layers):
        layers[i] = torch.compile(layer)
        fully_shard(layers[i], mesh=mesh, mp_policy=precision)
    return fully_shard(peer, mesh=mesh, mp_policy=precision), peer


def measure(job: Job, rank: int) -> dict[str, Any]:
    """Measures one device's step times in seconds, losses and peak memory."""
    device = torch.device("cuda", rank) if ON_GPU else torch.device("cpu")
    if ON_GPU:
        torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")
    peer, model = build(job, device)
    if ON_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    rate, warmup = train_worker.rate_of(job)
    options = {"lr": rate, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(peer.parameters(), fused=True, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / (warmup + 1), 1))
    autocast = job.subject == "autocast" and job.devices == 1
    share = slice(rank * job.batch // job.devices, (rank + 1) * job.batch // job.devices)
    began = time.perf_counter()
    first_step = 0.0

    def step(tokens):
        batch = torch.from_numpy(tokens[share])
        batch = (batch.pin_memory() if ON_GPU else batch).to(device, non_blocking=True).long()
        context = torch.autocast(device.type, torch.bfloat16) if autocast else contextlib.nullcontext()
        with context:
            loss = model(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        loss.backward()
        nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return to_host(loss.detach())

    def fetch(pending) -> float:
        nonlocal first_step
        loss, event = pending
        if event is not None:
            event.synchronize()
        first_step = first_step or time.perf_counter() - began
        return loss.item()

    inputs = train_worker.batches(job, get_config(job.model).vocab_size)
    losses, times = train_worker.run_steps(step, fetch, inputs)
    losses = average(losses, device) if job.devices > 1 else losses
    return {
        "times": times[job.before - 1 :],
        "times_before": times[: job.before - 1],
        "losses": losses,
        "compile_seconds": first_step,
        "peak_bytes": torch.cuda.max_memory_allocated() if ON_GPU else None,
        "reserved_bytes": torch.cuda.max_memory_reserved() if ON_GPU else None,
        "environment": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "device": torch.cuda.get_device_name() if ON_GPU else "cpu",
            "devices": job.devices,
        },
    }


def to_host(loss: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Starts copying the loss to the host; it is there after the event, which is None on a CPU."""
    if not ON_GPU:
        return loss, None
    host = loss.to("cpu", non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event


def average(losses: list[float], device: torch.device) -> list[float]:
    """Averages the losses over the devices, which have equal shares of a batch."""
    total = torch.tensor(losses, device=device)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def run_rank(rank: int, job: Job, path: pathlib.Path) -> None:
    """Measures on one of several devices; the first writes the outcome."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job.devices)}
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    try:
        outcome = measure(job, rank)
        if rank == 0:
            path.write_text(json.dumps(outcome))
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Measures the job that the command line names."""
    job, path = train_worker.read_job()
    if job.devices == 1:
        path.write_text(json.dumps(measure(job, 0)))
        return
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29517"}
    torch.multiprocessing.spawn(run_rank, (job, path), nprocs=job.devices)


if __name__ == "__main__":
    main()
