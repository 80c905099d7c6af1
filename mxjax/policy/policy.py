"""Policies: the precision of the three GEMMs of a linear layer, as pure, hashable data.

| GEMM | product | contracts | lhs | rhs |
| --- | --- | --- | --- | --- |
| Fprop | `y = x @ w` | d_in | x | w |
| Dgrad | `dx = dy @ w.T` | d_out | dy | w |
| Wgrad | `dw = x.T @ dy` | tokens | x | dy |

Variations are made with `dataclasses.replace`; `mxjax.recipes` holds the named ones.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import Literal

from mxjax.numerics.formats import FORMATS, FormatName
from mxjax.numerics.hadamard import SIZES
from mxjax.numerics.operand import Operand, check_choice, use_python_numbers
from mxjax.numerics.rotations import Kind, Order
from mxjax.numerics.scales import ScaleRule

Signs = Literal["none", "fixed", "redrawn"]
OPERANDS: Mapping[str, tuple[str, str]] = types.MappingProxyType(
    {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("x", "dy")}
)
"""The operands of a linear layer's GEMMs, lhs and rhs, by GEMM."""


@dataclasses.dataclass(frozen=True)
class Rotation:
    """A blockwise rotation of both operands of a GEMM, along the axis that it contracts.

    Attributes:
      size: size of the matrix, e.g. 16 for H16; 1 for a permutation alone.
      signs: "none" (deterministic), "fixed" (drawn once from `seed`) or "redrawn" (from the key at every
        call).
      seed: seed of the fixed signs, from 0 to 2**32 - 1.
      values: the fixed signs themselves, `size` of +1 or -1, instead of signs drawn from `seed`.
      kind: the matrix; see `mxjax.numerics.rotations.rotation_matrix`. Kernels know "hadamard" alone; XLA
        computes the others, and permutations.
      order: "given", or a random permutation of the whole axis before the rotation and the blocks, the same
        for both operands: "fixed" (drawn once from `seed`) or "redrawn" (from the key at every call).
    """

    size: int = 16
    signs: Signs = "none"
    seed: int = 0
    values: tuple[int, ...] | None = None
    kind: Kind = "hadamard"
    order: Order = "given"

    def __post_init__(self):
        use_python_numbers(self)
        check_choice("signs", self.signs, Signs)
        check_choice("kind", self.kind, Kind)
        check_choice("order", self.order, Order)
        alone = self.order != "given" and self.signs == "none" and self.kind == "hadamard"
        if type(self.size) is not int or (self.size not in SIZES and not (self.size == 1 and alone)):
            raise ValueError(
                f"Rotation needs size to be one of {SIZES}, got {self.size}; a permutation alone has size 1, "
                "order='fixed' or 'redrawn' and no signs"
            )
        if type(self.seed) is not int or not 0 <= self.seed < 2**32:
            raise ValueError(f"Rotation needs seed to be from 0 to 2**32 - 1, got {self.seed!r}")
        if self.values is None:
            return
        given: object = self.values  # a list, a number, … from a caller without types
        signs = isinstance(given, tuple) and all(type(v) is int and abs(v) == 1 for v in given)
        if self.signs != "fixed" or not signs or len(self.values) != self.size:
            raise ValueError(
                f"Rotation needs values to be a tuple of {self.size} signs of 1 or -1 with signs='fixed', "
                f"got {self.values!r:.60} with signs={self.signs!r}; use None for signs drawn from seed"
            )

    def __str__(self) -> str:
        signs = {"none": "", "fixed": " fixed signs", "redrawn": " redrawn signs"}[self.signs]
        if self.values is not None:
            signs = " signs " + "".join("+" if value > 0 else "-" for value in self.values)
        names = {"hadamard": "H", "sequency": "sequency-H", "dct": "DCT", "haar": "Haar"}
        order = "" if self.order == "given" else f", {self.order} permutation"
        return f"{names[self.kind]}{self.size}{signs}{order}"

    @property
    def is_hadamard(self) -> bool:
        """Whether it is `mxjax.rotate` alone, which kernels compute."""
        return self.kind == "hadamard" and self.order == "given"

    @property
    def reads_seed(self) -> bool:
        """Whether anything is drawn from `seed`."""
        return self.order == "fixed" or (self.signs == "fixed" and self.values is None)


_MXFP4 = Operand()


@dataclasses.dataclass(frozen=True)
class Gemm:
    """The operands of one GEMM, and the rotation of both before they are quantized."""

    lhs: Operand = _MXFP4
    rhs: Operand = _MXFP4
    rotation: Rotation | None = None

    def __post_init__(self):
        for name, operand in (("lhs", self.lhs), ("rhs", self.rhs)):
            if not isinstance(operand, Operand):
                raise TypeError(
                    f"Gemm needs {name} to be an mxjax.Operand, got {operand!r}; {_instead(operand)}"
                )
        if not isinstance(self.rotation, Rotation | None):
            raise TypeError(
                f"Gemm needs rotation to be an mxjax.Rotation or None, got {self.rotation!r}; "
                "write Rotation(16) for H16"
            )
        if self.rotation is not None and (self.lhs.is_delayed or self.rhs.is_delayed):
            raise ValueError("scaling='delayed' takes the tensor as it is; use rotation=None")

    @property
    def needs_key(self) -> bool:
        """Whether running this GEMM draws random bits."""
        return self.lhs.needs_key or self.rhs.needs_key or self.redrawn_signs > 0 or self.redraws_order

    @property
    def redrawn_signs(self) -> int:
        """How many signs its rotation draws from the key."""
        return self.rotation.size if self.rotation and self.rotation.signs == "redrawn" else 0

    @property
    def redraws_order(self) -> bool:
        """Whether its rotation draws a permutation from the key."""
        return self.rotation is not None and self.rotation.order == "redrawn"

    def __str__(self) -> str:
        return f"{self.lhs} x {self.rhs}" + (f" ({self.rotation})" if self.rotation else "")


def _instead(value: object) -> str:
    """Returns the advice for an error: the expression to use instead of a value that is not an `Operand`."""
    known = isinstance(value, str) and value in FORMATS
    return f"write Operand({value!r})" if known else "write Operand('mxfp4'), for example"


@dataclasses.dataclass(frozen=True)
class Policy:
    """The precision of a linear layer: Fprop (x, w), Dgrad (dy, w) and Wgrad (x, dy).

    By default every GEMM and operand is in MXFP4 with rule `floor`, rounded to nearest, without rotation.

    Raises:
      ValueError: an operand has source "dequantized", but the Fprop does not quantize it (dy), or it is an
        operand of the Fprop; an operand of a backward GEMM has a `gradient`; a weight has a `split`; a tensor
        has two formats with delayed scales.
      TypeError: one of the three is not a `Gemm`.
    """

    fprop: Gemm = Gemm()
    dgrad: Gemm = Gemm()
    wgrad: Gemm = Gemm()

    def __post_init__(self):
        for name, gemm in self.gemms.items():
            if not isinstance(gemm, Gemm):
                example = (
                    f"Operand({gemm!r})" if isinstance(gemm, str) and gemm in FORMATS else "Operand('mxfp4')"
                )
                raise TypeError(
                    f"Policy needs {name} to be an mxjax.Gemm, got {gemm!r}; write Gemm({example}, {example})"
                    ", or take the GEMM of a policy, such as get_policy('fp8').fprop"
                )
        for name, gemm, gradient in (("dgrad", self.dgrad, "lhs"), ("wgrad", self.wgrad, "rhs")):
            if getattr(gemm, gradient).source == "dequantized":
                raise ValueError(
                    f"{name}.{gradient} is dy, which the Fprop does not quantize; use 'original'"
                )
        if any(o.source == "dequantized" for o in (self.fprop.lhs, self.fprop.rhs)):
            raise ValueError(
                "source='dequantized' is for backward GEMMs; the Fprop's operands are 'original'"
            )
        if any(o.split != "none" for o in (self.fprop.rhs, self.dgrad.rhs)):
            raise ValueError("split= is for x and dy, which have tokens; weights have split='none'")
        if any(
            o.gradient != "straight_through"
            for gemm in (self.dgrad, self.wgrad)
            for o in (gemm.lhs, gemm.rhs)
        ):
            raise ValueError(
                "gradient= is for the Fprop's operands; backward GEMMs' have gradient='straight_through'"
            )
        for tensor, formats in self._delayed_formats.items():
            if len(formats) > 1:
                raise ValueError(
                    f"scaling='delayed' gives {tensor} one scale for both of its GEMMs, so it needs one "
                    f"format; got {' and '.join(sorted(formats))}"
                )

    @property
    def gemms(self) -> dict[str, Gemm]:
        """The three GEMMs by name."""
        return {"fprop": self.fprop, "dgrad": self.dgrad, "wgrad": self.wgrad}

    @property
    def drawing(self) -> str:
        """The names of the GEMMs that draw random bits, for errors."""
        return ", ".join(name for name, gemm in self.gemms.items() if gemm.needs_key)

    @property
    def needs_key(self) -> bool:
        """Whether running any of the GEMMs draws random bits."""
        return any(gemm.needs_key for gemm in self.gemms.values())

    @property
    def delayed(self) -> dict[str, FormatName]:
        """The tensors (x, w, dy) whose scales come from earlier steps, with their formats."""
        return {tensor: next(iter(formats)) for tensor, formats in self._delayed_formats.items()}

    @property
    def _delayed_formats(self) -> dict[str, set[FormatName]]:
        found: dict[str, set[FormatName]] = {}
        for name, gemm in self.gemms.items():
            for tensor, operand in zip(OPERANDS[name], (gemm.lhs, gemm.rhs), strict=True):
                if operand.is_delayed:
                    found.setdefault(tensor, set()).add(operand.format)
        return found

    @property
    def idle_sources(self) -> tuple[str, ...]:
        """The operands with source "dequantized" whose tensor the Fprop reads unrotated in float32."""
        if self.fprop.rotation is not None:
            return ()
        seen = {"dgrad.rhs": (self.dgrad.rhs, self.fprop.rhs), "wgrad.lhs": (self.wgrad.lhs, self.fprop.lhs)}
        return tuple(
            name
            for name, (operand, first) in seen.items()
            if operand.source == "dequantized" and first.format == "fp32"
        )

    @property
    def has_mxfp4(self) -> bool:
        """Whether any of the six operands is in MXFP4."""
        return any(o.format == "mxfp4" for gemm in self.gemms.values() for o in (gemm.lhs, gemm.rhs))

    def __str__(self) -> str:
        return " | ".join(f"{name} {gemm}" for name, gemm in self.gemms.items())


def check_policy(policy: object, function: str) -> None:
    """Raises TypeError unless `policy` is a `Policy`, for a function that takes no names."""
    if not isinstance(policy, Policy):
        hint = f"; write mxjax.get_policy({policy!r})" if isinstance(policy, str) else ""
        raise TypeError(f"{function} needs an mxjax.Policy, got {policy!r:.60}{hint}")


def map_operands(policy: Policy, change: Callable[[Operand], Operand]) -> Policy:
    """Returns the policy with `change(operand) -> Operand` applied to all six operands."""
    return Policy(
        *(dataclasses.replace(g, lhs=change(g.lhs), rhs=change(g.rhs)) for g in policy.gemms.values())
    )


def with_current_scales(policy: Policy) -> Policy:
    """Returns the policy with current scales in place of delayed ones, where there is no history."""
    return (
        map_operands(policy, lambda o: dataclasses.replace(o, scaling="current"))
        if policy.delayed
        else policy
    )


def with_scale_rule(policy: Policy, rule: ScaleRule) -> Policy:
    """Returns the policy with `rule` for every operand in MXFP4.

    Raises:
      TypeError: `policy` is no `Policy`, for example a name.
      ValueError: unknown rule, or no operand of the policy is in MXFP4.
    """
    check_policy(policy, "with_scale_rule")
    if not policy.has_mxfp4:
        raise ValueError(f"scale rule {rule!r} has no effect: no operand of the policy is in mxfp4")
    return map_operands(policy, functools.partial(_change_rule, rule))


def _change_rule(rule: ScaleRule, operand: Operand) -> Operand:
    return dataclasses.replace(operand, scale_rule=rule) if operand.format == "mxfp4" else operand
