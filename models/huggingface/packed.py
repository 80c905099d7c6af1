"""Checkpoints whose linear layers are packed in MXFP4: their layouts, and reading them as ordinary ones."""

import pathlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from models.configs import DecoderConfig
from models.huggingface import compressed_tensors, gpt_oss, quark
from models.huggingface.architectures import model_type
from models.huggingface.files import Reader, Spec
from models.huggingface.quantized import QuantizedWeight
from mxjax.numerics.formats import BLOCK

PackedFormat = Literal["mxfp4", "quark"]


class _Configuration(Protocol):
    def __call__(self, excluded: Sequence[str], *, activations: bool) -> dict[str, Any]: ...


class _Check(Protocol):
    def __call__(self, raw: Mapping[str, Any]) -> None: ...


class Layout(NamedTuple):
    """How a format stores a matrix, as a module of this package defines it.

    Attributes:
      method: config.json's `quant_method`.
      weight: the name that follows the module's for the packed elements.
      scale: the name that follows the module's for the scale bytes.
      configuration: returns config.json's `quantization_config`.
      check: raises ValueError for a `quantization_config` of another scheme.
    """

    method: str
    weight: str
    scale: str
    configuration: _Configuration
    check: _Check

    def specs(self, name: str, shape: tuple[int, ...]) -> dict[str, Spec]:
        """Returns the tensors that store a matrix [out, in] of the module `name`."""
        rows, columns = shape
        return {
            f"{name}.{self.weight}": Spec("U8", (rows, columns // 2)),
            f"{name}.{self.scale}": Spec("U8", (rows, columns // BLOCK)),
        }

    def tensors(self, name: str, weight: QuantizedWeight) -> dict[str, np.ndarray]:
        """Returns the values of the tensors that `specs` describes."""
        return {f"{name}.{self.weight}": weight.packed, f"{name}.{self.scale}": weight.scales}


class _ExpertLayout(Layout):
    """gpt-oss's layout, whose tensors hold all experts. Every reader unpacks it, so nothing checks it."""

    def specs(self, name: str, shape: tuple[int, ...]) -> dict[str, Spec]:
        return gpt_oss.packed_specs(name, shape)

    def tensors(self, name: str, weight: QuantizedWeight) -> dict[str, np.ndarray]:
        return gpt_oss.packed_tensors(name, weight)


def _layout(of: ModuleType) -> Layout:
    return Layout(of.METHOD, of.WEIGHT, of.SCALE, of.configuration, of.check)


LAYOUTS: Mapping[PackedFormat, Layout] = {"mxfp4": _layout(compressed_tensors), "quark": _layout(quark)}
"""The formats of `export --quantize` for dense models."""
_GPT_OSS = _ExpertLayout(
    gpt_oss.METHOD, gpt_oss.BLOCKS, gpt_oss.SCALES, gpt_oss.configuration, lambda raw: None
)


def layout_for(config: DecoderConfig, name: PackedFormat | Literal["gguf"]) -> Layout | None:
    """Returns the layout in which `export --quantize` packs a model; None for GGUF's, a file of its own.

    Raises:
      ValueError: it has experts, and those of gpt-oss alone are packed, as "mxfp4".
    """
    if config.experts is None:
        return None if name == "gguf" else LAYOUTS[name]
    if model_type(config) != "gpt_oss" or name != "mxfp4":
        raise ValueError(
            f"--quantize {name} packs the linear layers of dense models, and mxfp4 gpt-oss's experts; "
            "leave it out for other experts"
        )
    return _GPT_OSS


def layout_of(raw: Mapping[str, Any]) -> Layout | None:
    """Returns the layout of a config.json's weights; None if they are not quantized.

    Raises:
      ValueError: they are quantized in another scheme; the message names it.
    """
    if (given := raw.get("quantization_config")) is None:
        return None
    method = given.get("quant_method") if isinstance(given, dict) else None
    if raw.get("model_type") == "gpt_oss" and method == "mxfp4":  # its experts, which every reader unpacks
        return None
    layout = next((layout for layout in LAYOUTS.values() if layout.method == method), None)
    if layout is None:
        known = " and ".join(repr(layout.method) for layout in LAYOUTS.values())
        raise ValueError(
            f"config.json: quantization_config has quant_method {method!r}; only MXFP4 of {known} is imported"
        )
    try:
        layout.check(given)
    except ValueError as error:
        raise ValueError(f"config.json: {error}") from None
    return layout


class PackedReader(Reader):
    """A `Reader` that shows each packed matrix as NAME.weight in bfloat16, which holds MXFP4 exactly."""

    def __init__(self, folder: pathlib.Path, layout: Layout):
        """Opens the files.

        Raises:
          ValueError: as of `Reader`; or packed elements and scales do not belong together.
        """
        super().__init__(folder)
        self._layout = layout
        self._packed: set[str] = set()
        try:
            for name in [n for n in self.specs if n.endswith(f".{layout.scale}")]:
                self._join(name.removesuffix(f".{layout.scale}"))
        except ValueError:
            self.__exit__()
            raise

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor in its own dtype, or the values of a packed matrix in float32."""
        module = name.removesuffix(".weight")
        if module not in self._packed:
            return super().read(name)
        parts = (super(PackedReader, self).read(f"{module}.{part}") for part in self._names)
        return QuantizedWeight.unpacked(*parts).values()

    @property
    def _names(self) -> tuple[str, str]:
        return self._layout.weight, self._layout.scale

    def _join(self, module: str) -> None:
        """Replaces the specs of a packed matrix by that of the matrix."""
        names = [f"{module}.{part}" for part in self._names]
        weight, scale = (self.specs.pop(name, None) for name in names)
        rows, half = weight.shape if weight and len(weight.shape) == 2 else (0, 0)
        wanted = self._layout.specs(module, (rows, 2 * half))
        if not rows or half % (BLOCK // 2) or [weight, scale] != [wanted[name] for name in names]:
            raise ValueError(
                f"{names[0]} is {weight and [weight.dtype, *weight.shape]} and {names[1]} "
                f"{scale and [scale.dtype, *scale.shape]}; "
                f"MXFP4 has U8 [out, in / 2] and U8 [out, in / {BLOCK}]"
            )
        self.specs[f"{module}.weight"] = Spec("BF16", (rows, 2 * half))
        self._packed.add(module)
