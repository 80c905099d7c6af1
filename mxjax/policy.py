"""Policies: the precision of the three GEMMs of a linear layer, as pure, hashable data.

| GEMM | product | contracts | lhs | rhs |
| --- | --- | --- | --- | --- |
| Fprop | `y = x @ w` | d_in | x | w |
| Dgrad | `dx = dy @ w.T` | d_out | dy | w |
| Wgrad | `dw = x.T @ dy` | tokens | x | dy |

Variations are made with `dataclasses.replace`; `mxjax.recipes` holds the named ones.
"""

import dataclasses
from typing import Literal, get_args

from mxjax.blocks import resolve_block_shape
from mxjax.formats import get_format
from mxjax.hadamard import SIZES
from mxjax.rounding import Rounding
from mxjax.scales import ScaleRule, check_rule

Source = Literal["original", "dequantized"]
Signs = Literal["none", "fixed", "redrawn"]


def _check_choice(name: str, value: str, choices) -> None:
    if value not in get_args(choices):
        raise ValueError(f"unknown {name} {value!r}; use one of {', '.join(get_args(choices))}")


@dataclasses.dataclass(frozen=True)
class Operand:
    """How one operand of a GEMM is quantized, along the axis that the GEMM contracts.

    Attributes:
      format: a name of `mxjax.formats.FORMATS`.
      block_shape: elements that share a scale, see `mxjax.quantize`; None for the format's own.
      scale_rule: see `mxjax.scales.block_scale`; formats without E8M0 scales ignore it.
      rounding: "nearest" or "stochastic".
      prescale: shrinks the elements after the scale is chosen; the GEMM's result is divided by it.
      source: "original", or "dequantized": what the Fprop's quantization left of the tensor.
    """

    format: str = "mxfp4"
    block_shape: int | tuple[int, int] | None = None
    scale_rule: ScaleRule = "floor"
    rounding: Rounding = "nearest"
    prescale: float | None = None
    source: Source = "original"

    def __post_init__(self):
        f = get_format(self.format)
        _check_choice("rounding", self.rounding, Rounding)
        _check_choice("source", self.source, Source)
        if f.element and f.scale == "e8m0":
            check_rule(self.scale_rule, f.element)
        resolve_block_shape(f, self.block_shape, ndim=2, axis=-1)
        if self.prescale is not None and not 0 < self.prescale <= 1:
            raise ValueError(f"prescale must be in (0, 1], got {self.prescale}")
        if f.element is None and (self.rounding == "stochastic" or self.prescale):
            raise ValueError(
                f"{self.format} is not quantized: it takes no stochastic rounding and no prescale"
            )

    def __str__(self) -> str:
        f = get_format(self.format)
        parts = [self.format]
        if self.block_shape is not None:
            pair = self.block_shape if isinstance(self.block_shape, tuple) else (1, self.block_shape)
            parts.append(f"{pair[0]}x{pair[1]}")
        if f.scale == "e8m0":
            parts.append(self.scale_rule)
        if self.rounding == "stochastic":
            parts.append("sr")
        if self.prescale is not None:
            parts.append(f"*{self.prescale:g}")
        if self.source == "dequantized":
            parts.append("dequantized")
        return ":".join(parts)


@dataclasses.dataclass(frozen=True)
class Rotation:
    """A blockwise Hadamard rotation of both operands of a GEMM, along the axis that it contracts.

    Attributes:
      size: 16 for H16, and so on.
      signs: "none" (deterministic), "fixed" (one random vector, drawn from `seed`), or "redrawn" from
        the key at every call.
      seed: of the fixed signs.
    """

    size: int = 16
    signs: Signs = "none"
    seed: int = 0

    def __post_init__(self):
        _check_choice("signs", self.signs, Signs)
        if self.size not in SIZES:
            raise ValueError(f"Rotation needs a size that is one of {SIZES}, got {self.size}")

    def __str__(self) -> str:
        return (
            f"H{self.size}" + {"none": "", "fixed": " fixed signs", "redrawn": " redrawn signs"}[self.signs]
        )


@dataclasses.dataclass(frozen=True)
class Gemm:
    """The operands of one GEMM and the rotation both take before they are quantized."""

    lhs: Operand = Operand()
    rhs: Operand = Operand()
    rotation: Rotation | None = None

    @property
    def needs_key(self) -> bool:
        """Whether running this GEMM draws random bits."""
        rounds = "stochastic" in (self.lhs.rounding, self.rhs.rounding)
        return rounds or (self.rotation is not None and self.rotation.signs == "redrawn")

    def __str__(self) -> str:
        return f"{self.lhs} x {self.rhs}" + (f" ({self.rotation})" if self.rotation else "")


@dataclasses.dataclass(frozen=True)
class Policy:
    """The precision of a linear layer: Fprop (x, w), Dgrad (dy, w) and Wgrad (x, dy).

    A GEMM or operand left out is MXFP4 by `floor`, to nearest, without rotation.

    Raises:
      ValueError: an operand whose source is "dequantized" but that the Fprop does not quantize (dy), or
        quantizes in a rotated basis.
    """

    fprop: Gemm = Gemm()
    dgrad: Gemm = Gemm()
    wgrad: Gemm = Gemm()

    def __post_init__(self):
        for name, gemm, gradient in (("dgrad", self.dgrad, "lhs"), ("wgrad", self.wgrad, "rhs")):
            if getattr(gemm, gradient).source == "dequantized":
                raise ValueError(
                    f"{name}.{gradient} is dy, which the Fprop does not quantize; use 'original'"
                )
        if any(o.source == "dequantized" for o in (self.fprop.lhs, self.fprop.rhs)):
            raise ValueError("source='dequantized' is what the Fprop left; its own operands are 'original'")
        if self.fprop.rotation and "dequantized" in (self.dgrad.rhs.source, self.wgrad.lhs.source):
            raise ValueError("source='dequantized' needs an Fprop without rotation")

    @property
    def gemms(self) -> dict[str, Gemm]:
        """The three GEMMs by name."""
        return {"fprop": self.fprop, "dgrad": self.dgrad, "wgrad": self.wgrad}

    @property
    def needs_key(self) -> bool:
        """Whether running any of the GEMMs draws random bits."""
        return any(gemm.needs_key for gemm in self.gemms.values())

    @property
    def has_mxfp4(self) -> bool:
        """Whether any of the six operands is in MXFP4."""
        return any(o.format == "mxfp4" for gemm in self.gemms.values() for o in (gemm.lhs, gemm.rhs))

    def __str__(self) -> str:
        return " | ".join(f"{name} {gemm}" for name, gemm in self.gemms.items())


def map_operands(policy: Policy, change) -> Policy:
    """Returns the policy with `change(operand) -> Operand` applied to all six operands."""

    def gemm(g: Gemm) -> Gemm:
        return dataclasses.replace(g, lhs=change(g.lhs), rhs=change(g.rhs))

    return Policy(*(gemm(g) for g in policy.gemms.values()))


def with_scale_rule(policy: Policy, rule: ScaleRule) -> Policy:
    """Returns the policy with `rule` for every operand in MXFP4.

    Raises:
      ValueError: unknown rule, or no operand of the policy is in MXFP4.
    """
    if not policy.has_mxfp4:
        raise ValueError(f"scale rule {rule!r} has no effect: no operand of the policy is in mxfp4")

    def change(operand: Operand) -> Operand:
        return dataclasses.replace(operand, scale_rule=rule) if operand.format == "mxfp4" else operand

    return map_operands(policy, change)
