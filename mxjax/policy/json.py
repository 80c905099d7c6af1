"""Policies as JSON, and changes to single fields by path, such as `wgrad.rhs.rounding`.

The JSON names every field of a policy, so it keeps its meaning if a default changes:

    {"fprop": {"lhs": {"format": "mxfp4", "block_shape": null, ...}, "rhs": {...}, "rotation": null}, ...}
"""

import dataclasses
import difflib
import json
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from mxjax.numerics.formats import get_format
from mxjax.numerics.operand import Operand
from mxjax.policy.policy import OPERANDS, Gemm, Policy, Rotation, check_policy

_GEMMS = tuple(OPERANDS)
_OPERANDS = ("lhs", "rhs")
_UNSIZED = object()  # size of a rotation of which only other fields are set
# Whether an operand or rotation reads a field, and which do; the others read all they have.
_READERS: Mapping[str, tuple[Callable[[Any], bool], str]] = types.MappingProxyType(
    {
        "scale_rule": (
            lambda operand: get_format(operand.format).scale == "e8m0",
            "formats with E8M0 scales, such as mxfp4",
        ),
        "quantile": (lambda operand: operand.split in ("outliers", "clip"), "split=outliers and split=clip"),
        "split_tokens": (lambda operand: operand.split == "mean", "split=mean"),
        "seed": (
            lambda rotation: rotation is None or rotation.reads_seed,
            "signs=fixed without values and order=fixed",
        ),
    }
)


def policy_to_json(policy: Policy, indent: int | None = None) -> str:
    """Returns a policy as JSON text with every field of its six operands and three rotations.

    `policy_from_json` of the text equals the policy.

    Args:
      indent: as in `json.dumps`; None writes one line.
    Raises:
      TypeError: `policy` is no `Policy`, for example a name.
    """
    check_policy(policy, "policy_to_json")
    return json.dumps(dataclasses.asdict(policy), indent=indent)


def policy_from_json(text: str | Mapping[str, Any]) -> Policy:
    """Returns the policy in a JSON text, or in what `json.loads` made of one.

    Fields that are left out have their defaults: `{"wgrad": {"rotation": {"size": 16}}}` is MXFP4 everywhere
    with H16 on Wgrad. A byte order mark, which some editors write, is skipped.

    Raises:
      ValueError: not JSON, a field twice, an unknown field, a value of the wrong type, or a policy that
        cannot be. The message names the field by its path.
    """
    if isinstance(text, str):
        try:
            text = json.loads(text.removeprefix("\ufeff"), object_pairs_hook=_once)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"a policy must be JSON, each field once, and this is not: {error}") from None
    fields = _fields(text, "policy", _GEMMS)
    gemms = {name: _gemm(value, name) for name, value in fields.items()}
    return _make(Policy, gemms, "policy")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object of JSON; Python's parser takes the last of two equal names."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r:.60} is a duplicate field")
        found[name] = value
    return found


def set_fields(policy: Policy, changes: Iterable[str]) -> Policy:
    """Returns the policy with fields changed by texts `PATH=VALUE`. Where two overlap, the later one holds.

    PATH is a GEMM, an operand and a field of `Operand` (`wgrad.rhs.rounding`), or a GEMM and `rotation` with
    or without a field of `Rotation` (`wgrad.rotation.size`). `*` stands for any GEMM or operand. VALUE is
    JSON or a bare word; `none` is None:

        set_fields(policy, ["wgrad.*.scale_rule=even", "wgrad.rotation=none", "*.rhs.block_shape=[32, 32]"])

    Setting the size of a rotation that is None makes one with its other fields at their defaults, or at the
    values that other changes give them.

    Raises:
      TypeError: `policy` is no `Policy`, for example a name, or `changes` is one text.
      ValueError: an unknown path, a value that the field does not take, or a policy that cannot be. Or a
        change has no effect: no operand or rotation that it names reads the field.
    """
    check_policy(policy, "set_fields")
    if isinstance(changes, str):
        raise TypeError(f"set_fields needs a sequence of texts PATH=VALUE, got a text; write [{changes!r}]")
    policy, idle = change_fields(policy, changes)
    for change, reason in idle.items():
        raise ValueError(f"{change!r} has no effect: {reason}")
    return policy


def change_fields(policy: Policy, changes: Iterable[str]) -> tuple[Policy, dict[str, str]]:
    """Returns the policy of `set_fields`, and the changes without an effect, each with the reason.

    Raises:
      ValueError: as `set_fields`, except for changes without an effect.
    """
    data, paths = dataclasses.asdict(policy), {}
    for change in changes:
        path, equals, value = change.partition("=")
        if not equals:
            raise ValueError(f"write PATH=VALUE, such as wgrad.rhs.rounding=stochastic; got {change!r}")
        paths[change] = [name.strip() for name in path.split(".")]
        try:
            _set(data, paths[change], _value(value.strip()))
        except ValueError as error:
            raise ValueError(f"{change!r}: {error}") from None
    unsized = {name for name in _GEMMS if _is_unsized(data[name]["rotation"])}
    for name in unsized:
        data[name]["rotation"] = None
    changed = policy_from_json(data)
    reasons = {change: _idle(changed, path, unsized) for change, path in paths.items()}
    return changed, {change: reason for change, reason in reasons.items() if reason is not None}


def _is_unsized(rotation: object) -> bool:
    return isinstance(rotation, dict) and rotation.get("size") is _UNSIZED


def _idle(policy: Policy, path: list[str], unsized: set[str]) -> str | None:
    """Returns why nothing that a path names reads its field; None if anything does.

    `unsized` are the GEMMs without a rotation, of which a change names another field than the size.
    """
    if path[1:] == ["rotation"]:
        return None
    if path[-1] == "source" and ".".join(path[:2]) in policy.idle_sources:
        return "the Fprop reads that tensor in float32"
    gemms = _chosen(path[0], _GEMMS, "GEMM")
    if path[1] == "rotation":
        rotated = [name for name in gemms if name not in unsized]
        if not rotated:
            return f"there is no rotation; set {path[0]}.rotation.size too"
        parts = [policy.gemms[name].rotation for name in rotated]
    else:
        sides = _chosen(path[1], _OPERANDS, "operand")
        parts = [getattr(policy.gemms[name], side) for name in gemms for side in sides]
    reads, words = _READERS.get(path[-1], (lambda _: True, ""))
    if any(reads(part) or _is_default(part, path[-1]) for part in parts):
        return None
    return f"{path[-1]} is for {words}"


def _is_default(part: Operand | Rotation | None, field: str) -> bool:
    """Whether a field of a policy's part has its default, which may be set where nothing reads it."""
    return part is not None and getattr(part, field) == getattr(type(part), field, None)


def _set(data: dict[str, Any], path: list[str], value: object) -> None:
    """Sets a field of a policy's data in place, for every GEMM and operand that the path names."""
    first, *rest = path
    for gemm in _chosen(first, _GEMMS, "GEMM"):
        match rest:
            case ["rotation"]:
                data[gemm]["rotation"] = value
            case ["rotation", field]:
                _check_name(field, _names(Rotation), f"{gemm}.rotation")
                rotation = data[gemm]["rotation"]
                rotation = {"size": _UNSIZED} if rotation is None else rotation
                if isinstance(rotation, dict):  # or it is refused later
                    data[gemm]["rotation"] = rotation | {field: value}
            case [side, field]:
                for operand in _chosen(side, _OPERANDS, "operand"):
                    _check_name(field, _names(Operand), f"{gemm}.{operand}")
                    data[gemm][operand] |= {field: value}
            case _:
                raise ValueError(
                    "a path is GEMM.OPERAND.FIELD, GEMM.rotation or GEMM.rotation.FIELD, with GEMM one of "
                    "fprop, dgrad, wgrad, * and OPERAND one of lhs, rhs, *"
                )


def _chosen(name: str, names: tuple[str, ...], kind: str) -> tuple[str, ...]:
    if name == "*":
        return names
    if name not in names:
        raise ValueError(f"unknown {kind} {name!r}; use one of {', '.join(names)}, or * for all")
    return (name,)


def _value(text: str) -> object:
    """Parses a value from the command line: JSON, `none` in any case, or else the text itself."""
    if text.lower() == "none":
        return None
    try:
        return json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError):  # the latter of thousands of brackets
        return text


def _gemm(data: object, path: str) -> Gemm:
    fields = _fields(data, path, (*_OPERANDS, "rotation"))
    made = {name: _operand(fields[name], f"{path}.{name}") for name in _OPERANDS if name in fields}
    rotation = fields.get("rotation")
    return Gemm(**made, rotation=None if rotation is None else _rotation(rotation, f"{path}.rotation"))


def _operand(data: object, path: str) -> Operand:
    fields = _fields(data, path, _names(Operand))
    for name in ("format", "scale_rule", "rounding", "source", "gradient", "split", "scaling"):
        _check_type(fields, name, path, lambda value: isinstance(value, str), "a string")
    _check_type(fields, "quantile", path, _is_number, "a number")
    for name in ("prescale", "scale_target", "scale_max"):
        _check_type(fields, name, path, lambda v: v is None or _is_number(v), "a number or null")
    _check_type(fields, "four_over_six", path, lambda v: v is None or isinstance(v, str), "a string or null")
    for name in ("eden", "split_tokens"):
        _check_type(fields, name, path, lambda v: v is None or _is_integer(v), "an integer or null")
    _check_type(fields, "block_shape", path, _is_block_shape, "an integer, a pair of integers or null")
    if isinstance(fields.get("block_shape"), list | tuple):
        fields["block_shape"] = tuple(fields["block_shape"])
    return _make(Operand, fields, path)


def _rotation(data: object, path: str) -> Rotation:
    fields = _fields(data, path, _names(Rotation))
    for name in ("size", "seed"):
        _check_type(fields, name, path, _is_integer, "an integer")
    for name in ("signs", "kind", "order"):
        _check_type(fields, name, path, lambda value: isinstance(value, str), "a string")
    _check_type(fields, "values", path, _is_integers_or_none, "a list of integers or null")
    if isinstance(fields.get("values"), list | tuple):
        fields["values"] = tuple(fields["values"])
    return _make(Rotation, fields, path)


def _fields(data: object, path: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Returns the fields of a JSON object, all of which must be named in `names`."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{path} must be an object with fields among {', '.join(names)}, got {data!r:.60}")
    fields = cast(Mapping[str, Any], data)
    for name in fields:
        _check_name(name, names, path)
    return dict(fields)


def _check_name(name: str, names: tuple[str, ...], path: str) -> None:
    if name not in names:
        close = difflib.get_close_matches(str(name), names, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"{path} has no field {name!r:.60}; {hint}its fields are {', '.join(names)}")


def _check_type(
    fields: Mapping[str, Any], name: str, path: str, fits: Callable[[Any], bool], wanted: str
) -> None:
    if name in fields and not fits(fields[name]):
        raise ValueError(f"{path}.{name} must be {wanted}, got {fields[name]!r:.60}")


def _make[T](cls: Callable[..., T], fields: Mapping[str, Any], path: str) -> T:
    try:
        return cls(**fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _names(cls: type[Operand] | type[Rotation]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_integers_or_none(value: Any) -> bool:
    return value is None or (isinstance(value, list | tuple) and all(map(_is_integer, value)))


def _is_number(value: object) -> bool:
    return _is_integer(value) or isinstance(value, float)


def _is_block_shape(value: Any) -> bool:
    pair = isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_integer, value))
    return value is None or _is_integer(value) or pair
