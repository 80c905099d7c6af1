"""The warning of `dot` that a frozen weight, in 4 bits already, is rounded to 4 bits again."""

import warnings

from mxjax.blocks import resolve_block_shape
from mxjax.formats import get_format
from mxjax.policy import Policy
from mxjax.quantize import MXArray


def warn_of_two_roundings(w: MXArray, policy: Policy) -> None:
    """Warns of a weight [d_in, d_out] in 4 bits which the Fprop rounds to other values of 4 bits.

    No warning if the Fprop keeps the values: with the same format and prescale, and its blocks equal to the
    weight's or, with scales that are powers of two, within them. A rotation, after which no blocks would fit,
    is left alone. An array does not say by which rule its scales were chosen, so that is not compared.
    """
    operand = policy.fprop.rhs
    formats = get_format(w.format), get_format(operand.format)
    if policy.fprop.rotation or any(f.element is None or f.element.bits != 4 for f in formats):
        return
    rows, length = w.block_shape
    has = (length, rows) if w.axis == -2 else (rows, length)
    d_out, d_in = resolve_block_shape(formats[1], operand.block_shape, 2, -2)
    wanted = (d_in, d_out)
    fits = has == wanted or (formats[1].scale == "e8m0" and all(map(_holds, has, wanted, w.shape)))
    if w.format == operand.format and w.prescale == operand.prescale and fits:
        return
    warnings.warn(
        f"dot rounds this frozen weight to 4 bits twice: it is in {w.format} with blocks of {_named(has)}, "
        f"the policy has {operand.format} with {_named(wanted)}; make it with the policy's own operand: "
        "mxjax.quantize(w, policy.fprop.rhs, axis=0)",
        stacklevel=3,
    )


def _holds(block: int, other: int, size: int) -> bool:
    """Whether blocks of `other` elements lie within blocks of `block` along an axis; 0 is the whole axis."""
    return not block or block >= size or bool(other and block % other == 0)


def _named(block: tuple[int, int]) -> str:
    along_d_in, along_d_out = block
    return f"{along_d_in or 'all'} along d_in x {along_d_out or 'all'} along d_out"
