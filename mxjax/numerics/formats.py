"""Number formats as data: element formats (minifloats) and block formats built on them.

Everything else derives from these tables; a new format is a new entry here.
Sources: OCP Microscaling Formats (MX) v1.0, section 5; NVFP4: arXiv 2509.25149, section 2;
FP8: arXiv 2209.05433; E3M0: arXiv 2112.10769; E1M2: arXiv 2606.20381; UE5M3: arXiv 2609.02846, section 4;
NVFP4 in 1x128 (double-block quantization): arXiv 2510.27527; vectors: arXiv 2501.17116.
"""

import dataclasses
import difflib
import types
from collections.abc import Mapping
from typing import Literal

import jax.numpy as jnp
from jax.typing import DTypeLike

ScaleKind = Literal["e8m0", "e4m3", "ue5m3", "fp32", "none"]
FormatName = Literal[
    "mxfp4",
    "mxfp4_e3m0",
    "mxfp4_e1m2",
    "mxfp6_e2m3",
    "mxfp6_e3m2",
    "mxfp8_e4m3",
    "mxfp8_e5m2",
    "nvfp4",
    "nvfp4_1x128",
    "fp4_ue5m3",
    "fp4_vector",
    "fp4_e1m2",
    "fp8_e4m3",
    "fp8_e5m2",
    "bf16",
    "fp32",
]

BLOCK = 32
"""Elements of an MX block, which share one scale byte."""


@dataclasses.dataclass(frozen=True)
class Element:
    """A minifloat with subnormals: sign (not if the name begins with u), exponent, mantissa."""

    name: str
    mantissa_bits: int  # stored bits, without the implicit one
    emax: int  # exponent of the largest magnitude
    emin: int  # exponent of the smallest normal magnitude
    max: float  # largest finite magnitude; rounding saturates here
    dtype: DTypeLike  # the JAX dtype that holds every value exactly

    @property
    def bits(self) -> int:
        """Storage bits an element takes in memory as the standard packs it."""
        exponent, mantissa = self.name.removeprefix("u")[1::2]
        return int(exponent) + int(mantissa) + (not self.name.startswith("u"))

    @property
    def min(self) -> float:
        """The smallest positive magnitude."""
        return 2.0 ** (self.emin - self.mantissa_bits)


E2M1 = Element("e2m1", 1, emax=2, emin=0, max=6.0, dtype=jnp.float4_e2m1fn)
E4M3 = Element("e4m3", 3, emax=8, emin=-6, max=448.0, dtype=jnp.float8_e4m3fn)
E5M2 = Element("e5m2", 2, emax=15, emin=-14, max=57344.0, dtype=jnp.float8_e5m2)
# XLA compiles no float6, E3M0 or E1M2 arithmetic, so their values travel in E4M3, which holds them all.
E2M3 = Element("e2m3", 3, emax=2, emin=0, max=7.5, dtype=jnp.float8_e4m3fn)
E3M2 = Element("e3m2", 2, emax=4, emin=-2, max=28.0, dtype=jnp.float8_e4m3fn)
E3M0 = Element("e3m0", 0, emax=4, emin=-2, max=16.0, dtype=jnp.float8_e4m3fn)
# A uniform grid: the multiples of 1/2 up to 3.5, which are INT4's -7 to 7 halved.
E1M2 = Element("e1m2", 2, emax=1, emin=1, max=3.5, dtype=jnp.float8_e4m3fn)
# Only 0xFF is NaN, as in PTX ISA 9.4; arXiv 2609.02846 gives up the top exponent and has a maximum of 61,440.
UE5M3 = Element("ue5m3", 3, emax=16, emin=-14, max=114688.0, dtype=jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Format:
    """A representation of a GEMM operand: its elements and what scales them.

    `element` None means an unscaled floating-point `dtype` (the baselines).
    `block` is the default number of elements along the contraction axis that share a scale, 0 for none or,
    with float32 scales, for all.
    `tensor_scale` adds one float32 scale for the whole tensor ("current scaling"), or, with `outer_block`,
    one for so many elements along the contraction axis.
    """

    name: FormatName
    dtype: DTypeLike
    element: Element | None = None
    block: int = 0
    scale: ScaleKind = "none"
    tensor_scale: bool = False
    outer_block: int = 0

    @property
    def scale_element(self) -> Element | None:
        """The minifloat of the block scales, or None if they are powers of two or there are none."""
        return {"e4m3": E4M3, "ue5m3": UE5M3}.get(self.scale)

    @property
    def scale_dtype(self) -> DTypeLike | None:
        """The dtype of the block scales, or None if there are none."""
        if self.scale_element is not None:
            return self.scale_element.dtype
        return {"e8m0": jnp.float8_e8m0fnu, "fp32": jnp.float32}.get(self.scale)

    @property
    def is_vector(self) -> bool:
        """Whether all elements along the contraction axis share one float32 scale."""
        return self.scale == "fp32" and not self.block

    @property
    def fits_bfloat16(self) -> bool:
        """Whether bfloat16 represents elements times block scales; a vector's scale is not one of a block."""
        return self.dtype != jnp.float32 and not self.outer_block and (self.scale != "fp32" or self.is_vector)


def _mx(name: FormatName, element: Element) -> Format:
    return Format(name, element.dtype, element, block=BLOCK, scale="e8m0")


def _fp8(name: FormatName, element: Element) -> Format:
    return Format(name, element.dtype, element, tensor_scale=True)


_FORMATS = (
    _mx("mxfp4", E2M1),
    _mx("mxfp4_e3m0", E3M0),
    _mx("mxfp4_e1m2", E1M2),
    _mx("mxfp6_e2m3", E2M3),
    _mx("mxfp6_e3m2", E3M2),
    _mx("mxfp8_e4m3", E4M3),
    _mx("mxfp8_e5m2", E5M2),
    Format("nvfp4", E2M1.dtype, E2M1, block=16, scale="e4m3", tensor_scale=True),
    Format("nvfp4_1x128", E2M1.dtype, E2M1, block=16, scale="e4m3", tensor_scale=True, outer_block=128),
    Format("fp4_ue5m3", E2M1.dtype, E2M1, block=16, scale="ue5m3"),
    Format("fp4_vector", E2M1.dtype, E2M1, scale="fp32"),  # arXiv 2501.17116, section 2
    Format("fp4_e1m2", E1M2.dtype, E1M2, block=16, scale="fp32"),  # arXiv 2606.20381, table 1
    _fp8("fp8_e4m3", E4M3),
    _fp8("fp8_e5m2", E5M2),
    Format("bf16", jnp.bfloat16),
    Format("fp32", jnp.float32),
)

FORMATS: Mapping[str, Format] = types.MappingProxyType({f.name: f for f in _FORMATS})


def get_format(name: str) -> Format:
    """Returns the format called `name`.

    Raises:
      ValueError: no such format; the message lists those there are.
    """
    if name not in FORMATS:
        text = name if isinstance(name, str) else ""
        close = [known for known in FORMATS if text and known.startswith(text)]
        close = close or difflib.get_close_matches(text, FORMATS, n=1)
        hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
        raise ValueError(f"unknown format {name!r}; {hint}the formats are {', '.join(FORMATS)}")
    return FORMATS[name]
