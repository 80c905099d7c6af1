"""`Operand`: the quantization of one operand of a GEMM. Only this module defines and checks its options."""

import dataclasses
from typing import Any, Literal, get_args

import numpy as np

from mxjax.numerics.blocks import BlockShape, resolve_block_shape
from mxjax.numerics.formats import BLOCK, Format, FormatName, get_format
from mxjax.numerics.rounding import Rounding
from mxjax.numerics.scales import ScaleRule, check_rule

Source = Literal["original", "dequantized"]
Gradient = Literal["straight_through", "clipped", "dge"]
Splitting = Literal["none", "mean", "outliers", "clip"]
FourOverSix = Literal["mse", "mae"]
Scaling = Literal["current", "delayed"]

MOST_ELEMENTS = 2**16
"""The largest block and run of `eden`: a smaller tensor is filled up to a whole one."""


@dataclasses.dataclass(frozen=True)
class Operand:
    """The quantization of one operand: pure, hashable data that refers to no tensor and no axis.

    A policy has six operands. `mxjax.quantize` makes one from its arguments.

    Attributes:
      format: a name in `mxjax.FORMATS`.
      block_shape: number of elements along the contracted axis that share a scale, or a pair (r, b): r along
        the other of the last two axes, b along the contracted one; at most 2**16 in all. None: the format's
        own, 1 x 32 for MX.
      scale_rule: see `mxjax.numerics.scales.block_scale`; only formats with E8M0 scales read it, others
        ignore it.
      rounding: "nearest" (ties to even) or "stochastic", which needs a key.
      prescale: factor that shrinks the elements, not the scale, so that fewer of them clip; at most 1, and at
        least the element's smallest magnitude over its largest, 1/12 for E2M1. The GEMM's result (or
        `dequantize`) is divided by it. None: no prescale.
      source: "original", or "dequantized": a backward GEMM reads the values that the Fprop's quantization
        produced instead of the tensor itself. If the Fprop rotates, those values are the rotated ones, the
        backward GEMM gives the gradient of the rotated tensor, and it is rotated back.
      gradient: for the operands of the Fprop, how their gradient passes through the quantization; see
        `mxjax.products.gradients`.
      split: for x and dy, what is taken out before the quantization and multiplied apart; see
        `mxjax.operands.split`.
      split_tokens: for `split` "mean", number of neighbouring tokens that share a mean, which is then kept in
        bfloat16. None: all tokens, in float32.
      quantile: the quantile of a token's elements past which they are outliers, for `split` "outliers" and
        "clip".
      scale_target: element to which a block's largest magnitude is scaled before its scale is rounded, at
        least the smallest, 0.5; for formats with E4M3 or UE5M3 scales. None: the element's largest, 6. With
        6 * 16/17 nothing clips.
      scale_max: scale of the tensor's largest block, set by the float32 scale of the tensor; a value that
        such a scale can have. None: 448 in NVFP4; in `fp4_ue5m3` there is no tensor scale.
      four_over_six: each block is scaled to `scale_target` or to 2/3 of it (to 4 instead of 6), whichever has
        the lower error: "mse" or "mae". None: to `scale_target`. Formats with E4M3 or UE5M3 scales.
      eden: number of elements along the contracted axis that share an EDEN correction of their scales, which
        are then rounded stochastically; it needs a key, and unbiased results a rotation with redrawn signs.
        None: no correction. Formats with E4M3 or UE5M3 scales.
      scaling: for FP8, "current": the scale is that of the tensor itself. "delayed": it comes from earlier
        steps and is an argument, `mxjax.dot(scales=)`; see `mxjax.numerics.delayed`.
    Raises:
      ValueError: an unknown name, a bad block shape, prescale or quantile, or options that the format does
        not take.
      TypeError: prescale, quantile, scale_target or scale_max is no number.
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
    scale_target: float | int | None = None
    scale_max: float | int | None = None
    four_over_six: FourOverSix | None = None
    eden: int | None = None
    split_tokens: int | None = None
    scaling: Scaling = "current"

    def __post_init__(self):
        use_python_numbers(self)
        for name in ("prescale", "quantile", "scale_target", "scale_max"):
            given: object = getattr(self, name)  # anything, from a caller without types
            unset = given is None and name != "quantile"
            if not unset and type(given) not in (int, float):
                raise TypeError(f"Operand needs {name} to be a number, got {given!r}")
        f = get_format(self.format)
        check_rule(self.scale_rule, f.element if f.scale == "e8m0" else None)
        check_choice("rounding", self.rounding, Rounding)
        check_choice("source", self.source, Source)
        rows, length = resolve_block_shape(f, self.block_shape, ndim=2, axis=-1)
        if rows * length > MOST_ELEMENTS:
            raise ValueError(
                f"block_shape may hold at most {MOST_ELEMENTS:,} elements, got {rows}x{length}: a smaller "
                "tensor is padded to one block"
            )
        if f.element is None and (self.rounding == "stochastic" or self.prescale is not None):
            raise ValueError(f"{self.format} is not quantized: use rounding='nearest' and prescale=None")
        if f.element is not None and self.prescale is not None:
            _check_within("prescale", self.prescale, f.element.min / f.element.max, 1.0)
        check_choice("gradient", self.gradient, Gradient)
        check_choice("split", self.split, Splitting)
        if self.split_tokens is not None and (self.split != "mean" or self.split_tokens < 1):
            raise ValueError(
                f"split_tokens is for split='mean' and at least 1, got {self.split_tokens} with "
                f"split={self.split!r}; use None"
            )
        if not 0.5 < self.quantile < 1:
            raise ValueError(f"quantile must be between 0.5 and 1, got {self.quantile}")
        if f.element is None and (self.gradient != "straight_through" or self.split != "none"):
            raise ValueError(
                f"{self.format} is not quantized: use gradient='straight_through' and split='none'"
            )
        if f.scale_element is not None and self.gradient != "straight_through":
            raise ValueError(
                f"gradient {self.gradient!r} is for formats without E4M3 or UE5M3 scales, not {self.format}"
            )
        check_choice("scaling", self.scaling, Scaling)
        if self.is_delayed:
            self._check_delayed(f)
        self._check_minifloat_scales()

    def _check_delayed(self, f: Format) -> None:
        """Raises ValueError unless the format has one scale a tensor, which is read as it is."""
        if f.element is None or f.scale != "none":
            raise ValueError(f"scaling='delayed' is for fp8_e4m3 and fp8_e5m2, not {self.format}")
        plain = self.source == "original" and self.split == "none" and self.prescale is None
        if not plain or self.gradient != "straight_through":
            raise ValueError(
                "scaling='delayed' takes the tensor as it is; leave source, split, prescale and gradient out"
            )

    def _check_minifloat_scales(self) -> None:
        """Raises ValueError if an option for E4M3 and UE5M3 scales is out of range or does not apply."""
        f = get_format(self.format)
        for name in ("scale_target", "scale_max", "four_over_six", "eden"):
            if getattr(self, name) is not None and f.scale_element is None:
                raise ValueError(
                    f"{name} is for formats with E4M3 or UE5M3 scales, not {self.format}; use None"
                )
        if f.element is None or f.scale_element is None:
            return
        if self.scale_target is not None:
            _check_within("scale_target", self.scale_target, f.element.min, 2 * f.element.max)
        if self.scale_max is not None:
            _check_within("scale_max", self.scale_max, f.scale_element.min, f.scale_element.max)
        if self.eden is not None and (type(self.eden) is not int or self.eden > MOST_ELEMENTS):
            raise ValueError(f"eden must be an integer of at most {MOST_ELEMENTS:,}, got {self.eden!r}")
        if self.four_over_six is not None:
            check_choice("four_over_six", self.four_over_six, FourOverSix)
        if self.prescale is not None and (self.four_over_six or self.eden):
            raise ValueError("four_over_six and eden take no prescale; use scale_target")
        rows, length = resolve_block_shape(f, self.block_shape, ndim=2, axis=-1)
        if f.outer_block and (rows > 1 or f.outer_block % length):
            raise ValueError(
                f"{self.format} needs 1-D blocks whose length divides {f.outer_block}, got {rows}x{length}"
            )
        if self.eden is None:
            return
        if rows > 1 or self.eden < 1 or self.eden % length:
            raise ValueError(
                f"eden needs 1-D blocks and a multiple of their length, got eden {self.eden} for blocks of "
                f"{rows}x{length}; use 128"
            )
        if self.rounding == "stochastic":
            raise ValueError(
                "eden rounds the scales stochastically, not the elements; use rounding='nearest'"
            )

    @property
    def needs_key(self) -> bool:
        """Whether quantizing draws random bits."""
        return self.rounding == "stochastic" or self.eden is not None

    @property
    def is_delayed(self) -> bool:
        """Whether its scale comes from earlier steps."""
        return self.scaling == "delayed"

    @property
    def is_packable(self) -> bool:
        """Whether kernels pack it: MXFP4 in blocks of 32, or but for the rule `quest` of 32 x 32, whole."""
        square = () if self.scale_rule == "quest" else ((BLOCK, BLOCK),)
        blocks = self.block_shape in (None, BLOCK, (1, BLOCK), *square)
        return self.format == "mxfp4" and blocks and self.split == "none"

    @property
    def is_block16(self) -> bool:
        """Whether a kernel quantizes it: E2M1 with E4M3 or UE5M3 scales, blocks of 16 or of 16 x 16."""
        f = get_format(self.format)
        blocks = self.block_shape in (None, 16, (1, 16), (16, 16))
        runs = self.eden in (None, 16, 32, 64, 128)
        return f.scale_element is not None and blocks and runs and not self.prescale

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
        for name in ("scale_target", "scale_max", "eden"):
            if getattr(self, name) is not None:
                parts.append(f"{name.removeprefix('scale_')}={getattr(self, name):.5g}")
        if self.four_over_six is not None:
            parts.append(f"4/6 {self.four_over_six}")
        if self.is_delayed:
            parts.append("delayed")
        if self.source == "dequantized":
            parts.append("dequantized")
        if self.gradient != "straight_through":
            parts.append(self.gradient)
        if self.split != "none":
            detail = self.split_tokens if self.split == "mean" else f"{self.quantile:g}"
            parts.append(f"-{self.split}" + (f"({detail})" if detail else ""))
        return ":".join(parts)


def _check_within(name: str, value: float | int, least: float, most: float) -> None:
    """Raises ValueError unless a number is in [least, most]; below, what it scales would become 0."""
    if not least <= value <= most:
        raise ValueError(
            f"{name} must be from {least:.3g} to {most:g}, got {value}; use None for the default"
        )


def use_python_numbers(part: Any) -> None:
    """Makes Python's numbers of a dataclass's numpy scalars, also in tuples, which JSON does not take."""
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        value = tuple(map(_plain, value)) if isinstance(value, tuple) else _plain(value)
        object.__setattr__(part, field.name, value)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def check_choice(name: str, value: str, choices: Any) -> None:
    """Raises ValueError unless `value` is one of the Literal `choices`."""
    if value not in get_args(choices):
        raise ValueError(f"unknown {name} {value!r}; use one of {', '.join(get_args(choices))}")
