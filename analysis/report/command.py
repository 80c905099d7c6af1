"""The command that repeats a run, from its configuration."""

import shlex
from typing import Any

from mxjax.policy import Policy
from training.command_line import PRESETS
from training.config import Config, by_flag

_APPENDED = {"set"}  # given once for each value
_ALWAYS = {"policy", "steps", "seed"}  # said even where they are defaults
_OF_AN_INVOCATION = {"out", "resume", "stop_after", "preset"}


def command_of(config: Config, out: str) -> str:
    """Returns the command line that begins the run anew in `out`, with every flag that is no default.

    A policy that a program gave, which has no name, becomes POLICY.json; its fields are in config.json.
    """
    preset = config.preset
    default = Config() if preset is None else PRESETS[preset](config.data.batch_size)
    words = [] if preset is None else ["--preset", preset]
    if preset is not None and config.data.batch_size != PRESETS[preset](32).data.batch_size:
        words += ["--batch-size", str(config.data.batch_size)]
    ours, theirs = by_flag(config), by_flag(default)
    for name, value in ours.items():
        if name not in _OF_AN_INVOCATION and (name in _ALWAYS or value != theirs[name]):
            words += _words(name, value)
    return shlex.join(["python", "train.py", *words, "--out", out])


def _words(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    if isinstance(value, Policy):
        return [flag, "POLICY.json"]
    if isinstance(value, tuple):
        if name in _APPENDED:
            return [word for part in value for word in (flag, part)]
        return [flag, *map(str, value)]
    return [flag, "None" if value is None else str(value)]


def settings_of(config: Config) -> dict[str, str]:
    """Returns the flags of a run as texts, but those that say where it is."""
    flags = by_flag(config).items()
    return {name: _text(value) for name, value in flags if name not in _OF_AN_INVOCATION}


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
