"""Machines for `benchmarks.paper_models.scaling`: rates in FLOP/s and bytes a second, capacity in bytes."""

import dataclasses
from collections.abc import Mapping

from benchmarks.paper_models.mi355x_rates import MEASURED


@dataclasses.dataclass(frozen=True)
class Machine:
    """A GPU and its network.

    Attributes:
      gemm: FLOP/s by format of the operands.
      attention: FLOP/s of causal attention, forward and backward, without the masked half.
      memory: bytes a second, reads and writes together.
      capacity: bytes of memory.
      node: GPUs in a node.
      fast, slow: bytes a second that a GPU sends and receives, within the node and between nodes.
      latency: seconds of each step of a ring between nodes.
      carried: whether MXFP4 operands are written once more, in FP8, for the GEMMs.
      peak: published dense bfloat16 FLOP/s, the base of MFU.
    """

    name: str
    gemm: Mapping[str, float]
    attention: float
    memory: float
    capacity: float
    fast: float
    slow: float
    peak: float
    node: int = 8
    latency: float = 10e-6
    carried: bool = False


USABLE_LINK, USABLE_NIC = 0.75, 0.8
"""Usable fractions of the published rates of a link and of a network card. The first is AMD's measurement
of MI300X's links (48 of 64 GB/s), used for all machines; the second is an assumption."""
NIC = 400e9 / 8 * USABLE_NIC
"""One card of 400 Gb/s for each GPU."""

_GEMM = {kind: MEASURED[kind] for kind in ("bf16", "fp8")}
# Seven links of 153.6 GB/s in both directions together, one to each other GPU of the node.
_MI355X = Machine(
    name="MI355X",
    gemm=_GEMM | {"mxfp4": MEASURED["hipblaslt_mxfp4"]},
    attention=MEASURED["attention"],
    memory=MEASURED["memory"],
    capacity=288e9,
    fast=7 * 153.6e9 / 2 * USABLE_LINK,
    slow=NIC,
    peak=2516.6e12,
)
MACHINES = {
    "mi355x": _MI355X,
    "mi355x-best": dataclasses.replace(
        _MI355X, name="MI355X, best MXFP4 GEMM", gemm=_GEMM | {"mxfp4": MEASURED["mxfp4"]}
    ),
    # GEMMs, attention and a copy as measured; NVLink 4 has 900 GB/s in both directions together. MXFP4 values
    # are multiplied in FP8.
    "h200": Machine(
        name="H200",
        gemm={"bf16": 803e12, "fp8": 1416e12, "mxfp4": 1416e12},
        attention=534e12,
        memory=4.0e12,
        capacity=141e9,
        fast=450e9 * USABLE_LINK,
        slow=NIC,
        peak=989e12,
        carried=True,
    ),
}
