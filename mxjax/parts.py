"""The check that elements, scales and tensor scale of an `MXArray` belong together."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from mxjax.blocks import scales_shape
from mxjax.formats import Format, get_format


def check_parts(function: str, q: Any) -> None:
    """Raises an error unless the parts of q, an `MXArray`, are those of its format and blocks.

    Raises:
      TypeError: a part is missing, there is one that the format has not, or one is in another dtype.
      ValueError: an axis counted from the front, or a part of another shape.
    """
    f = get_format(q.format)
    _check_elements(function, q, f)
    if q.axis >= 0:
        raise ValueError(
            f"{function} needs the axis of an MXArray counted from the end, got {q.axis} of {q.shape}: "
            f"write {q.axis - len(q.shape)}"
        )
    _check_scales(function, q, f)
    if f.tensor_scale and q.tensor_scale is None:
        raise TypeError(f"{function} needs the tensor_scale of {f.name}, got None")
    if q.tensor_scale is None:
        return
    shape = scales_shape(q.shape, (1, f.outer_block), q.axis) if f.outer_block else q.shape
    if not _broadcasts(q.tensor_scale.shape, shape):
        raise ValueError(
            f"{function} needs a tensor_scale that broadcasts to {shape}, got {q.tensor_scale.shape}; "
            f"of a stack that jax.vmap quantized, map {function} likewise"
        )


def _check_elements(function: str, q: Any, f: Format) -> None:
    wanted, got = jnp.dtype(f.dtype), getattr(q.elements, "dtype", None)
    if got not in (wanted, jnp.float32):  # float32 before they are stored
        hint = "; unpack them: mxjax.unpack(packed, axis=q.axis)" if got == jnp.uint8 else ""
        raise TypeError(f"{function} needs elements of {f.name} in {wanted}, got {got}{hint}")


def _check_scales(function: str, q: Any, f: Format) -> None:
    wanted = None if f.scale_dtype is None else jnp.dtype(f.scale_dtype)
    got = None if q.scales is None else q.scales.dtype
    if got != wanted:
        saved = got == jnp.uint8 and wanted is not None and wanted.itemsize == 1
        hint = f"; bytes that were saved: scales.view(jnp.{wanted})" if saved else ""
        raise TypeError(f"{function} needs scales of {f.name} in {wanted}, got {got}{hint}")
    if q.scales is None:
        return
    shape = scales_shape(q.shape, q.block_shape, q.axis)
    if q.scales.shape != shape:
        rows, length = q.block_shape
        raise ValueError(
            f"{function} needs scales {shape} for elements {q.shape} in blocks of {rows}x{length} along axis "
            f"{q.axis}, got {q.scales.shape}"
        )


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, to) == to
    except ValueError:
        return False
