"""`Operand`: the quantization of one operand of a GEMM. Only this module defines and checks its options."""

import dataclasses
from typing import Any, Literal, get_args

from mxjax.blocks import BlockShape, resolve_block_shape
from mxjax.formats import BLOCK, FormatName, get_format
from mxjax.rounding import Rounding
from mxjax.scales import ScaleRule, check_rule

Source = Literal["original", "dequantized"]
Gradient = Literal["straight_through", "clipped", "dge"]
Splitting = Literal["none", "mean", "outliers", "clip"]


@dataclasses.dataclass(frozen=True)
class Operand:
    """The quantization of one operand: pure, hashable data that refers to no tensor and no axis.

    A policy has six operands. `mxjax.quantize` makes one from its arguments.

    Attributes:
      format: a name in `mxjax.FORMATS`.
      block_shape: number of elements along the contracted axis that share a scale, or a pair (r, b): r along
        the other of the last two axes, b along the contracted one. None: the format's own, 1 x 32 for MX.
      scale_rule: see `mxjax.scales.block_scale`; it applies only to formats with E8M0 scales.
      rounding: "nearest" (ties to even) or "stochastic", which needs a key.
      prescale: factor in (0, 1] that shrinks the elements, not the scale, so that fewer of them clip. The
        GEMM's result (or `dequantize`) is divided by it. None: no prescale.
      source: "original", or "dequantized": a backward GEMM reads the values that the Fprop's quantization
        produced instead of the tensor itself. If the Fprop rotates, those values are the rotated ones, the
        backward GEMM gives the gradient of the rotated tensor, and it is rotated back.
      gradient: for the operands of the Fprop, how their gradient passes through the quantization; see
        `mxjax.estimators`.
      split: for x and dy, what is taken out before the quantization and multiplied apart; see `mxjax.split`.
      quantile: the quantile of a token's elements past which they are outliers, for `split` "outliers" and
        "clip".
    Raises:
      ValueError: an unknown name, a bad block shape, prescale or quantile, or options that the format does
        not take.
    """

    format: FormatName = "mxfp4"
    block_shape: BlockShape = None
    scale_rule: ScaleRule = "floor"
    rounding: Rounding = "nearest"
    prescale: float | None = None
    source: Source = "original"
    gradient: Gradient = "straight_through"
    split: Splitting = "none"
    quantile: float = 0.99

    def __post_init__(self):
        f = get_format(self.format)
        check_rule(self.scale_rule, f.element if f.scale == "e8m0" else None)
        check_choice("rounding", self.rounding, Rounding)
        check_choice("source", self.source, Source)
        check_choice("gradient", self.gradient, Gradient)
        resolve_block_shape(f, self.block_shape, ndim=2, axis=-1)
        if self.prescale is not None and not 0 < self.prescale <= 1:
            raise ValueError(f"prescale must be in (0, 1], got {self.prescale}; use None for no prescale")
        if f.element is None and (self.rounding == "stochastic" or self.prescale):
            raise ValueError(f"{self.format} is not quantized: use rounding='nearest' and prescale=None")
        check_choice("split", self.split, Splitting)
        if not 0.5 < self.quantile < 1:
            raise ValueError(f"quantile must be between 0.5 and 1, got {self.quantile}")
        if f.element is None and (self.gradient != "straight_through" or self.split != "none"):
            raise ValueError(
                f"{self.format} is not quantized: use gradient='straight_through' and split='none'"
            )

    @property
    def is_packable(self) -> bool:
        """Whether kernels pack it: MXFP4 in blocks of 32 or of 32 x 32, whole, scaled by their maximum."""
        blocks = self.block_shape in (None, BLOCK, (1, BLOCK), (BLOCK, BLOCK))
        whole = self.scale_rule != "quest" and self.split == "none"
        return self.format == "mxfp4" and blocks and whole

    @property
    def is_square(self) -> bool:
        """Whether blocks are 32 x 32."""
        return self.block_shape == (BLOCK, BLOCK)

    def __str__(self) -> str:
        f = get_format(self.format)
        parts: list[str] = [self.format]
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
        if self.gradient != "straight_through":
            parts.append(self.gradient)
        if self.split != "none":
            parts.append(f"-{self.split}" + (f"({self.quantile:g})" if self.split != "mean" else ""))
        return ":".join(parts)


def check_choice(name: str, value: str, choices: Any) -> None:
    """Raises ValueError unless `value` is one of the Literal `choices`."""
    if value not in get_args(choices):
        raise ValueError(f"unknown {name} {value!r}; use one of {', '.join(get_args(choices))}")
