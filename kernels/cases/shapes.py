"""The shapes of Llama 3.1 8B's linear layers, and small odd ones: shared by builds, tests and benchmarks.

Source: The Llama 3 Herd of Models, arXiv 2407.21783: width 4096, 32 query and 8 key-value heads of 128,
hidden width 14336. Query, key and value are one GEMM, as are the gate and up projections.
"""

from collections.abc import Mapping
from typing import NamedTuple

Linears = Mapping[str, tuple[int, int]]
"""(d_in, d_out) of each linear layer of a block."""
LINEARS = {
    "attention.qkv": (4096, 6144),
    "attention.out": (4096, 4096),
    "mlp.gate_up": (4096, 28672),
    "mlp.down": (14336, 4096),
}
TOKENS = (8192, 16384)
EXPERT, EXPERTS, EXPERT_ROWS = (4096, 14336), 8, 32768
"""(d_in, d_out) of an expert of Mixtral 8x7B (arXiv 2401.04088), their number, and the rows of all: two
experts for each of 16,384 tokens."""


class GemmShape(NamedTuple):
    """out [batch, m, n] = lhs [batch, m, k] @ rhs [batch, n, k].T"""

    name: str
    m: int
    n: int
    k: int
    batch: int = 1


class TensorShape(NamedTuple):
    """A tensor that the quantizer reads."""

    name: str
    rows: int
    columns: int


def gemms(tokens: int, linears: Linears = LINEARS) -> list[GemmShape]:
    """Returns the three GEMMs of each linear layer at a number of tokens."""
    shapes = []
    for layer, (d_in, d_out) in linears.items():
        shapes += [
            GemmShape(f"{layer}.fprop", tokens, d_out, d_in),
            GemmShape(f"{layer}.dgrad", tokens, d_in, d_out),
            GemmShape(f"{layer}.wgrad", d_in, d_out, tokens),
        ]
    return shapes


def tensors(tokens: int, linears: Linears = LINEARS) -> list[TensorShape]:
    """Returns activation, output gradient and weight of each linear layer at a number of tokens."""
    shapes = []
    for layer, (d_in, d_out) in linears.items():
        shapes += [
            TensorShape(f"{layer}.activation", tokens, d_in),
            TensorShape(f"{layer}.gradient", tokens, d_out),
            TensorShape(f"{layer}.weight", d_in, d_out),
        ]
    return shapes


# m and n that are no multiples of a tile; k of one block, less than a tile, whole tiles, and a remainder; and
# more rows of tiles than one group takes.
EDGE_GEMMS = [
    GemmShape("edge.one", 1, 1, 32),
    GemmShape("edge.short", 5, 7, 96),
    GemmShape("edge.tile", 64, 64, 256),
    GemmShape("edge.remainder", 65, 33, 288),
    GemmShape("edge.batch", 17, 130, 544, batch=3),
    GemmShape("edge.tiles", 256, 256, 512),
    GemmShape("edge.groups", 1100, 70, 32),
]

EDGE_TENSORS = [
    TensorShape("edge.one", 1, 1),
    TensorShape("edge.row", 1, 33),
    TensorShape("edge.column", 33, 1),
    TensorShape("edge.block", 32, 32),
    TensorShape("edge.remainder", 65, 97),
    TensorShape("edge.tiles", 256, 256),
]
