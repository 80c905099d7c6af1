"""Checks of the arguments of functions that users call; inside `jit` they run while it traces."""

import operator
from typing import Any

import jax.numpy as jnp


def check_arrays(function: str, **arrays: Any) -> None:
    """Raises TypeError if a named argument of `function` is no array, or not in this machine's byte order."""
    for name, x in arrays.items():
        if not hasattr(x, "ndim"):
            convert = "mxjax.dequantize" if type(x).__name__ == "MXArray" else "jnp.asarray"
            raise TypeError(
                f"{function} needs {name} to be an array, not {type(x).__name__}; pass {convert}({name})"
            )
        if not getattr(getattr(x, "dtype", None), "isnative", True):
            raise TypeError(
                f"{function} needs {name} in this machine's byte order, got {x.dtype.str}; pass "
                f"{name}.astype({name}.dtype.newbyteorder('='))"
            )


def check_tensor(function: str, x: Any) -> None:
    """Raises TypeError unless x is an array in floating point, ValueError if it has no axis."""
    check_arrays(function, x=x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{function} needs a floating-point tensor, got {x.dtype}; cast it to float32")
    check_has_axis(function, x)


def check_axis(function: str, axis: object) -> None:
    """Raises TypeError unless `axis` is an integer."""
    try:
        operator.index(axis)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{function} needs axis to be an integer, got {axis!r}") from None


def check_has_axis(function: str, x: Any) -> None:
    """Raises ValueError for an array without axes."""
    if not x.ndim:
        raise ValueError(f"{function} needs an array with an axis, got a scalar; reshape it to (1,)")
