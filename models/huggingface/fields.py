"""Values of the fields of config.json, with errors that name the field."""

from collections.abc import Mapping
from reprlib import repr as short
from typing import Any


def switch(raw: Mapping[str, Any], name: str) -> bool:
    """Returns a switch, which is off by default."""
    if not isinstance(value := raw.get(name, False), bool):
        raise ValueError(f"config.json: {name} must be true or false, got {short(value)}")
    return value


def coefficient(raw: Mapping[str, Any], name: str) -> float | None:
    """Returns the coefficient of a loss; None for zero."""
    return None if raw.get(name) in (None, 0) else positive(raw, name)


def unsupported(name: str, value: object, why: str) -> ValueError:
    """Returns the error for a field of config.json that changes values; `why` is a clause."""
    return ValueError(
        f"config.json: {name} is {short(value)}, and {why}; "
        "remove it if the model was trained without it, else it cannot be imported"
    )


def size(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Returns a positive integer; null is the default if there is one."""
    value = raw.get(name)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"config.json: {name} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise ValueError(f"config.json: {name} must be a positive integer below 2**31, got {short(value)}")
    return value


def positive(raw: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """Returns a positive number that float32 holds, and so does its square."""
    value = raw.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 1e-19 < value < 1e19:
        raise ValueError(f"config.json: {name} must be a positive number, got {short(value)}")
    return float(value)
