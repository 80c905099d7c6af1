"""Sizes of the checks' runs: for GPUs, and small enough for two CPU cores."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the checks.

    Attributes:
      steps, every: steps of the runs that are resumed, and from checkpoint to checkpoint.
      small: flags of these runs.
      mesh: flags of the runs on meshes.
      model: the model of these, whose weights two devices can share between whole blocks.
      remat: flags of the runs whose memory is measured.
      mlperf: flags of MLPerf's preset, scaled down.
      tokens: tokens to sample.
      product: batch, tokens, d_in and d_out of the products on two devices.
      patience: factor on the time that each check has.
    """

    steps: int
    every: int
    small: str
    mesh: str
    model: dict[str, Any]
    remat: str
    mlperf: str
    tokens: int
    product: tuple[int, int, int, int]
    patience: float = 1.0

    @property
    def kill(self) -> int:
        """Steps after which a run is killed: by then one checkpoint is complete."""
        return self.every * 5 // 2


_SMALL = "--lr 1e-3 --warmup-steps 5 --eval-batches 2 --log-every 5"
# At 1e-3 the loss has spikes in the first steps, in which the smallest differences grow.
_CALM = "--lr 1e-4 --warmup-steps 5 --eval-batches 3 --log-every 5 --policy wgrad_hadamard"
_MLPERF = "--preset mlperf-llama3.1-8b --vocab-size 16384 --warmup-steps 5"
_ROPE: dict[str, Any] = {"vocab_size": 32_000, "rope_theta": 10_000.0, "norm_eps": 1e-6}

GPU = Sizes(
    steps=40,
    every=10,
    small=f"--model 20m --batch-size 16 --seq-len 256 {_SMALL}",
    mesh=f"--batch-size 16 --seq-len 256 --steps 20 {_CALM}",
    # The model 60m, but for its d_ff of 1376, 43 blocks.
    model=_ROPE
    | {"d_model": 512, "n_layers": 8, "n_heads": 8, "n_kv_heads": 8, "head_dim": 64, "d_ff": 1408},
    remat="--model 125m --batch-size 16 --seq-len 512",
    mlperf=f"{_MLPERF} --model 20m --seq-len 256 --lr 4e-3 --eval-every 10 --target-loss 7.8 "
    "--eval-sequences 64 --stop-after 150",
    tokens=16,
    product=(8, 256, 512, 1024),
)
CPU = Sizes(
    steps=12,
    every=3,
    small=f"--model tiny --batch-size 4 --seq-len 32 {_SMALL}",
    mesh=f"--batch-size 4 --seq-len 32 --steps 4 {_CALM}",
    model=_ROPE | {"d_model": 128, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "d_ff": 384},
    # A CPU's own implementation packs nothing, and refuses --remat fp4.
    remat="--model tiny --batch-size 4 --seq-len 32 --implementation fp8_carriers",
    mlperf=f"{_MLPERF} --model tiny --batch-size 4 --seq-len 32 --lr 5e-3 --eval-every 4 --target-loss 8.9 "
    "--eval-sequences 16 --stop-after 40",
    tokens=4,
    product=(4, 64, 128, 64),
    patience=10.0,
)
