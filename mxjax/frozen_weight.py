"""The warning of `dot` that a frozen weight, in 4 bits already, is rounded to 4 bits again."""

import warnings

from mxjax.blocks import resolve_block_shape
from mxjax.formats import get_format
from mxjax.policy import Policy
from mxjax.quantize import MXArray


def warn_of_two_roundings(w: MXArray, policy: Policy) -> None:
    """Warns of a weight [d_in, d_out] in 4 bits which the Fprop rounds to other values of 4 bits.

    None is needed if each of the Fprop's blocks lies within one of the weight's, of the same format: its
    values are values of a smaller scale, too. A rotation, after which no blocks would fit, is left alone.
    """
    seen = policy.fprop.rhs
    formats = get_format(w.format), get_format(seen.format)
    if policy.fprop.rotation or any(f.element is None or f.element.bits != 4 for f in formats):
        return
    rows, length = w.block_shape
    has = (length, rows) if w.axis == -2 else (rows, length)
    d_out, d_in = resolve_block_shape(formats[1], seen.block_shape, 2, -2)
    wanted = (d_in, d_out)
    if w.format == seen.format and all(map(_holds, has, wanted)):
        return
    format_ = "" if seen.format == "mxfp4" else f"{seen.format!r}, "
    block_shape = "" if seen.block_shape is None else f", block_shape={seen.block_shape}"
    warnings.warn(
        f"dot rounds this frozen weight to 4 bits twice: it is in {w.format} with blocks of {_named(has)}, "
        f"the policy has {seen.format} with {_named(wanted)}; make it by "
        f"mxjax.quantize(w, {format_}axis=0{block_shape})",
        stacklevel=3,
    )


def _holds(block: int, other: int) -> bool:
    """Whether blocks of `other` elements lie within blocks of `block`; 0 is the whole axis."""
    return not block or bool(other and block % other == 0)


def _named(block: tuple[int, int]) -> str:
    along_d_in, along_d_out = block
    return f"{along_d_in or 'all'} along d_in x {along_d_out or 'all'} along d_out"
