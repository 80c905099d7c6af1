"""Values of the fields of config.json, single ones and those of each layer; errors name the field."""

from collections.abc import Mapping
from reprlib import repr as short
from typing import Any

from models.configs import DecoderConfig
from models.huggingface.architectures import ARCHITECTURES


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


_LAYER_TYPES = ("full_attention", "sliding_attention")
_MOST_LAYERS = 10_000  # beyond them no layers are listed: the sizes are refused later


def read_windows(
    raw: Mapping[str, Any], kind: str, layers: int, rope_layers: tuple[int, ...]
) -> tuple[int, ...]:
    """Returns the window of each layer, 0 without one; empty if no layer has one."""
    if raw.get("sliding_window") is None or not raw.get("use_sliding_window", "sliding_window" in raw):
        return ()
    window, types = size(raw, "sliding_window"), raw.get("layer_types")
    if types is None:
        first = size(raw, "max_window_layers") if "max_window_layers" in raw else 0
        slides = [i >= first if kind != "gpt_oss" else i % 2 == 0 for i in range(min(layers, _MOST_LAYERS))]
        slides += [False] * (layers - len(slides))
        slides = [not rotates for rotates in rope_layers] if kind == "smollm3" else slides
    else:
        if not isinstance(types, list) or not set(map(str, types)) <= set(_LAYER_TYPES):
            raise unsupported("layer_types", types, f"only {' and '.join(_LAYER_TYPES)} are supported")
        if len(types) != layers:
            raise ValueError(f"config.json: layer_types has {len(types)} entries for {layers} layers")
        slides = [name == _LAYER_TYPES[1] for name in types]
    return tuple(window if slide else 0 for slide in slides) if any(slides) else ()


def read_rope_layers(raw: Mapping[str, Any], kind: str, layers: int) -> tuple[int, ...]:
    """Returns 1 for each layer that rotates queries and keys, 0 for the others; empty if all do."""
    if kind != "smollm3" or layers > _MOST_LAYERS:
        return ()
    if (found := raw.get("no_rope_layers")) is None:
        interval = size(raw, "no_rope_layer_interval")
        found = [int((i + 1) % interval != 0) for i in range(layers)]
    if not isinstance(found, list) or len(found) < layers or any(x not in (0, 1) for x in found):
        raise ValueError(
            f"config.json: no_rope_layers must have 1 (rotated) or 0 for each of {layers} layers, got "
            f"{short(found)}"
        )
    return tuple(map(int, found[:layers])) if 0 in found[:layers] else ()


def read_dense(raw: Mapping[str, Any], kind: str, layers: int) -> tuple[int, ...]:
    """Returns the width of the MLP of each layer without experts, 0 for others; empty if all have them."""
    if kind != "qwen3_moe" or layers > _MOST_LAYERS:
        return ()
    listed, step = raw["mlp_only_layers"], size(raw, "decoder_sparse_step")
    if not isinstance(listed, list | tuple) or any(x not in range(layers) for x in listed):
        raise ValueError(
            f"config.json: mlp_only_layers must list some of {layers} layers by number, got {short(listed)}"
        )
    dense = [i in listed or (i + 1) % step != 0 for i in range(layers)]
    if all(dense):
        raise ValueError("config.json: mlp_only_layers and decoder_sparse_step leave no layer with experts")
    width = size(raw, "intermediate_size")
    return tuple(width if found else 0 for found in dense) if any(dense) else ()


def window_fields(config: DecoderConfig, kind: str) -> dict[str, Any]:
    """Returns the fields of sliding windows that the architecture has."""
    own, windows = ARCHITECTURES[kind].fields, config.windows
    found: dict[str, Any] = {"sliding_window": max(windows, default=0) or None}
    if "layer_types" in own:
        found["layer_types"] = [_LAYER_TYPES[bool(w)] for w in windows or (0,) * config.n_layers]
    if "use_sliding_window" in own:
        found["use_sliding_window"] = bool(windows)
    return found if "sliding_window" in own else {}
