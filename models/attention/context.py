"""Context parallelism: the mesh axis `context` shards sequences.

The tokens of a batch are in rows. Without `context` a row is a sequence. With it the devices of a `context`
group share their sequences: `cut` makes `parts` consecutive rows of each, one for each device, or none if
there is a whole sequence for every device. Rows keep the order of the tokens, so that all products over
tokens, their blocks and their random bits are those of one device. Only RoPE and attention
(`models.attention.ring`) know of it. Shapes in names as in `models.decoder`; S counts the tokens of a row,
T those of a sequence.
"""

import contextlib
from collections.abc import Mapping

from jaxtyping import Array, Shaped

from models.sharding import batch_parts_of, constrain
from mxjax.numerics.formats import BLOCK


def sequence_parts(sizes: Mapping[str, int], sequences: int, length: int) -> int:
    """Returns into how many rows each of the sequences is cut on a mesh of these sizes.

    Raises:
      ValueError: devices cannot share the sequences evenly, or blocks of Wgrad's tokens would straddle rows.
    """
    devices, own = sizes["context"], sequences // batch_parts_of(sizes)
    if devices == 1 or (own and own % devices == 0):
        return 1
    if not own or devices % own:
        raise ValueError(
            f"--mesh context={devices} needs a divisor or a multiple of {devices} sequences at once in each "
            f"data x expert x fsdp group, got {own}; change --batch-size or --accumulate"
        )
    parts = devices // own
    if length % (BLOCK * parts) or not length:
        above = -(-max(length, 1) // (BLOCK * parts)) * BLOCK * parts
        raise ValueError(
            f"--mesh context={devices} cuts sequences into {parts} parts of whole blocks of {BLOCK} tokens, "
            f"got --seq-len {length}; take {above}"
        )
    return parts


def fewest_sequences(sizes: Mapping[str, int], sequences: int, length: int) -> tuple[int, int]:
    """Returns the least of these sequences that a mesh of these sizes can share, and a unit of their length.

    It can share as many of every shorter length that is a multiple of the unit.

    Args:
      sizes: the size of each mesh axis.
      sequences, length: numbers that `sequence_parts` accepts.
    """
    groups = batch_parts_of(sizes)
    for few in range(groups, sequences + 1, groups):
        with contextlib.suppress(ValueError):
            parts = sequence_parts(sizes, few, length)
            return few, BLOCK * parts if parts > 1 else 1
    raise AssertionError("sequence_parts accepts all of them")


def cut(x: Shaped[Array, "B T *rest"], parts: int) -> Shaped[Array, "rows S *rest"]:
    """Returns the rows of sequences, on their devices."""
    rows = x.reshape(x.shape[0] * parts, x.shape[1] // parts, *x.shape[2:])
    return constrain(rows, "rows", *(None for _ in rows.shape[1:]))


def join(x: Shaped[Array, "rows S *rest"], parts: int) -> Shaped[Array, "B T *rest"]:
    """Returns the sequences of rows: the inverse of `cut`."""
    return x.reshape(x.shape[0] // parts, x.shape[1] * parts, *x.shape[2:])
