"""Checkpoints whose linear layers are packed in FP4: their layouts, and reading them as ordinary ones."""

import functools
import pathlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Literal, NamedTuple, Protocol

import ml_dtypes
import numpy as np

from models.configs import DecoderConfig
from models.huggingface import compressed_tensors, gpt_oss, quark
from models.huggingface.architectures import model_type
from models.huggingface.files import Reader, Spec
from models.huggingface.quantized import FP4, QuantizedWeight
from mxjax.numerics.float_scales import SMALLEST_TENSOR_MAX
from mxjax.numerics.formats import BLOCK, E2M1, E4M3, get_format

PackedFormat = Literal["mxfp4", "nvfp4", "quark"]


class _Configuration(Protocol):
    def __call__(self, excluded: Sequence[str], *, activations: bool) -> dict[str, Any]: ...


class Layout(NamedTuple):
    """How a format stores a matrix, as a module of this package defines it.

    Attributes:
      method: config.json's `quant_method`.
      number: the weights' format.
      weight: the name that follows the module's for the packed elements.
      scale: the name that follows the module's for the scales.
      configuration: returns config.json's `quantization_config`.
    """

    method: str
    number: FP4
    weight: str
    scale: str
    configuration: _Configuration

    def specs(self, name: str, shape: tuple[int, ...], *, inputs: bool = False) -> dict[str, Spec]:
        """Returns the tensors that store a matrix [out, in] of the module `name`.

        Args:
          inputs: the divisor of NVFP4's activations is stored too.
        """
        rows, columns = shape
        of_scales = "U8" if self.number == "mxfp4" else "F8_E4M3"
        found = {
            f"{name}.{self.weight}": Spec("U8", (rows, columns // 2)),
            f"{name}.{self.scale}": Spec(of_scales, (rows, columns // get_format(self.number).block)),
        }
        if self.number == "nvfp4":
            divisors = (compressed_tensors.DIVISOR, compressed_tensors.INPUT_DIVISOR)[: 1 + inputs]
            found |= {f"{name}.{divisor}": Spec("F32", (1,)) for divisor in divisors}
        return found

    def tensors(
        self, name: str, weight: QuantizedWeight, largest_input: float | None = None
    ) -> dict[str, np.ndarray]:
        """Returns the values of the tensors that `specs` describes.

        Args:
          largest_input: the largest magnitude of the module's activations, if consumers round them to NVFP4.
        """
        found = {f"{name}.{self.weight}": weight.packed, f"{name}.{self.scale}": weight.scales}
        if weight.divisor is not None:
            found[f"{name}.{self.scale}"] = weight.scales.view(ml_dtypes.float8_e4m3fn)
            found[f"{name}.{compressed_tensors.DIVISOR}"] = np.array([weight.divisor])
        if largest_input is not None:
            divisor = np.array([LARGEST_NVFP4 / max(largest_input, SMALLEST_TENSOR_MAX)], np.float32)
            found[f"{name}.{compressed_tensors.INPUT_DIVISOR}"] = divisor
        return found


class _ExpertLayout(Layout):
    """gpt-oss's layout, whose tensors hold all experts. Every reader unpacks it, so `layout_of` does not."""

    def specs(self, name: str, shape: tuple[int, ...], *, inputs: bool = False) -> dict[str, Spec]:
        experts, size, out = shape
        scales = (experts, out, size // BLOCK)
        return {name + self.weight: Spec("U8", (*scales, BLOCK // 2)), name + self.scale: Spec("U8", scales)}

    def tensors(
        self, name: str, weight: QuantizedWeight, largest_input: float | None = None
    ) -> dict[str, np.ndarray]:
        blocks = weight.packed.reshape(*weight.scales.shape, BLOCK // 2)
        return {name + self.weight: blocks, name + self.scale: weight.scales}


LARGEST_NVFP4 = E2M1.max * E4M3.max
"""2688, the largest magnitude of NVFP4 in units of the tensor's scale."""
_MODULES: Mapping[str, ModuleType] = {m.METHOD: m for m in (compressed_tensors, quark)}


def _compressed(number: FP4) -> Layout:
    of = compressed_tensors
    return Layout(of.METHOD, number, of.WEIGHT, of.SCALE, functools.partial(of.configuration, number))


LAYOUTS: Mapping[PackedFormat, Layout] = {
    "mxfp4": _compressed("mxfp4"),
    "nvfp4": _compressed("nvfp4"),
    "quark": Layout(quark.METHOD, "mxfp4", quark.WEIGHT, quark.SCALE, quark.configuration),
}
"""The formats of `export --quantize`, for models other than gpt-oss."""
_GPT_OSS = _ExpertLayout(gpt_oss.METHOD, "mxfp4", gpt_oss.BLOCKS, gpt_oss.SCALES, gpt_oss.configuration)


def layout_for(config: DecoderConfig, name: PackedFormat | Literal["gguf"]) -> Layout | None:
    """Returns the layout in which `export --quantize` packs a model; None for GGUF's, a file of its own.

    Raises:
      ValueError: it is gpt-oss, whose own layout is that of MXFP4.
    """
    if model_type(config) != "gpt_oss":
        return None if name == "gguf" else LAYOUTS[name]
    if name != "mxfp4":
        raise ValueError(f"--quantize {name} does not take gpt-oss's experts; leave it out, or use mxfp4")
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
    if not isinstance(method, str) or method not in _MODULES:
        known = " and ".join(map(repr, _MODULES))
        raise ValueError(
            f"config.json: quantization_config has quant_method {method!r}; only FP4 of {known} is imported"
        )
    try:
        number = _MODULES[method].number_of(given)
    except ValueError as error:
        raise ValueError(f"config.json: {error}") from None
    return next(found for found in LAYOUTS.values() if (found.method, found.number) == (method, number))


class PackedReader(Reader):
    """A `Reader` that shows each packed matrix as NAME.weight.

    It shows MXFP4 in bfloat16, which holds its values exactly, and NVFP4 in float32.
    """

    def __init__(self, folder: pathlib.Path, layout: Layout):
        """Opens the files.

        Raises:
          ValueError: as of `Reader`; or the tensors of a packed matrix do not belong together.
        """
        super().__init__(folder)
        self._layout = layout
        self._packed: dict[str, list[str]] = {}
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
        packed, scales, *divisor = (super(PackedReader, self).read(n) for n in self._packed[module])
        if divisor and not 0 < divisor[0][0] < np.inf:  # it would negate or clear the matrix, or make it NaN
            raise ValueError(
                f"{self._packed[module][-1]} must be positive and finite, got {divisor[0][0]}; download the "
                "weights again"
            )
        return QuantizedWeight.unpacked(packed, scales.view(np.uint8), *(d[0] for d in divisor)).values()

    def packed_weights(self) -> frozenset[str]:
        is_mxfp4 = self._layout.number == "mxfp4"
        return frozenset(f"{module}.weight" for module in self._packed if is_mxfp4)

    def read_packed(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        names = self._packed[name.removesuffix(".weight")]
        packed, scales = (super(PackedReader, self).read(n) for n in names)
        return packed, scales

    def _join(self, module: str) -> None:
        layout = self._layout
        shape = getattr(self.specs.get(f"{module}.{layout.weight}"), "shape", ())
        rows, half = shape if len(shape) == 2 else (0, 0)
        wanted = layout.specs(module, (rows, 2 * half))
        found = {name: self.specs.pop(name, None) for name in wanted}
        self.specs.pop(f"{module}.{compressed_tensors.INPUT_DIVISOR}", None)  # for consumers of activations
        if f"{module}.weight" in self.specs:
            raise ValueError(f"{module} has both weight and {layout.weight}; download the weights again")
        if not rows or 2 * half % get_format(layout.number).block or found != wanted:
            given = ", ".join(f"{n} is {spec and [spec.dtype, *spec.shape]}" for n, spec in found.items())
            names = ("[out, in / 2]", f"[out, in / {get_format(layout.number).block}]", "[1]")
            right = zip((spec.dtype for spec in wanted.values()), names, strict=False)
            raise ValueError(f"{given}; {layout.number.upper()} has {', '.join(map(' '.join, right))}")
        self.specs[f"{module}.weight"] = Spec("BF16" if layout.number == "mxfp4" else "F32", (rows, 2 * half))
        self._packed[module] = list(wanted)
