"""Kinds of Wgrad: what is done to x and dy along the tokens before they are quantized.

A kind's name may end in an arrangement of the tokens: `wgrad_hadamard+anew` permutes them anew at every step.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import cast

from mxjax.numerics.operand import Operand
from mxjax.numerics.rotations import Kind
from mxjax.policy import Gemm, Rotation

_UNCLIPPED = Operand(rounding="stochastic", prescale=0.75)
WGRAD_KINDS: Mapping[str, Gemm] = types.MappingProxyType(
    {
        "wgrad": Gemm(),
        "wgrad_hadamard": Gemm(rotation=Rotation(16)),
        "wgrad_rht": Gemm(rotation=Rotation(16, "redrawn")),
        "wgrad_sr": Gemm(Operand(rounding="stochastic"), Operand(rounding="stochastic")),
        "wgrad_sr34": Gemm(_UNCLIPPED, _UNCLIPPED),
    }
)
"""The kinds of the study's first part."""
ARRANGED = ("wgrad", "wgrad_hadamard", "wgrad_fixed", "wgrad_rht")
"""The kinds whose tokens are arranged in every way."""


def _permuted(gemm: Gemm, **order: str) -> Gemm:
    rotation = gemm.rotation or Rotation(1, order="fixed")
    return dataclasses.replace(gemm, rotation=dataclasses.replace(rotation, **order))


def _without_means(gemm: Gemm, tokens: int) -> Gemm:
    operand = Operand(split="mean", split_tokens=tokens)
    return dataclasses.replace(gemm, lhs=operand, rhs=operand)


ARRANGEMENTS: Mapping[str, Callable[[Gemm], Gemm]] = types.MappingProxyType(
    {
        "once": lambda gemm: _permuted(gemm, order="fixed"),
        "anew": lambda gemm: _permuted(gemm, order="redrawn"),
        "means16": lambda gemm: _without_means(gemm, 16),
        "means32": lambda gemm: _without_means(gemm, 32),
    }
)
"""Tokens permuted once or anew at every step, and the means of neighbours split off and kept in bfloat16."""
_LOCAL = {
    f"wgrad_{kind}{size}": Rotation(size, kind=cast(Kind, kind))
    for kind, sizes in (
        ("hadamard", (64, 128)),
        ("sequency", (64, 128)),  # in a block of 32 the order of H16 or H32 changes nothing
        ("dct", (16, 32, 64, 128)),
        ("haar", (16, 32, 64, 128)),
    )
    for size in sizes
}
LOCAL = ("wgrad_hadamard32", *_LOCAL, "wgrad_rht+means16", "wgrad_rht+means32")
"""Kinds that gather what neighbouring tokens share."""
_BASES = {
    **WGRAD_KINDS,
    "wgrad_fixed": Gemm(rotation=Rotation(16, "fixed")),
    **{name: Gemm(rotation=rotation) for name, rotation in _LOCAL.items()},
}
KINDS: Mapping[str, Gemm] = types.MappingProxyType(
    _BASES
    | {
        f"{name}+{arrangement}": arrange(_BASES[name])
        for name in ARRANGED
        for arrangement, arrange in ARRANGEMENTS.items()
    }
)
"""All kinds by name."""
_BESIDE = {
    "none": Gemm(),
    "hadamard": Gemm(rotation=Rotation(16)),
    "rht": Gemm(rotation=Rotation(16, "redrawn")),
}
BESIDE: Mapping[str, Gemm] = types.MappingProxyType(
    {
        f"fprop_dgrad_{name}{suffix}": arrange(gemm)
        for name, gemm in _BESIDE.items()
        for suffix, arrange in (("", lambda gemm: gemm), ("+anew", ARRANGEMENTS["anew"]))
        if (name, suffix) != ("none", "")  # that is wgrad_hadamard
    }
)
"""Kinds of Fprop and Dgrad, whose axes are d_in and d_out, beside H16 on Wgrad."""
