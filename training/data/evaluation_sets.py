"""Evaluation sets: what `--eval-data` names, their batches, and their losses in bits per byte of text."""

import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Integer

from training.files import absolute_path

_NAMED = re.compile(r"([\w.-]+)=(.*)", re.DOTALL)  # a path with a slash before its = has no name

Evaluation = dict[str, Any]
"""`eval_loss` and so on of the first set; "eval_sets" has those of each set by name, if they have names."""


class EvaluationSet(NamedTuple):
    """Held-out data.

    Attributes:
      name: the name that --eval-data gives; empty for the only set.
      batches: int32 [batch, seq_len + 1] each, whole in every process.
      n_bytes: bytes of text that the targets stand for; None if their tokenizer is unknown.
    """

    name: str
    batches: list[np.ndarray]
    n_bytes: int | None = None


def parse_eval_data(values: Sequence[str]) -> dict[str, str]:
    """Returns the paths that `--eval-data PATH` or `--eval-data NAME=PATH ...` names, by name.

    The name of one without is empty.

    Raises:
      ValueError: several without names of letters, digits, `_`, `-` and `.`; a name given twice, or an empty
        path.
    """
    found: dict[str, str] = {}
    for name, path in map(_split, values):
        if not path:
            raise ValueError("--data and --eval-data name files, folders or datasets, got an empty name")
        if name in found or (len(values) > 1 and not name):
            raise ValueError(
                "--eval-data takes one PATH, or NAME=PATH for each of several, with different names of "
                f"letters, digits, _, - and .; got {shlex.join(values)}"
            )
        found[name] = path
    return found


def absolute_eval_data(values: Sequence[str]) -> tuple[str, ...]:
    """Returns the values of --eval-data with absolute paths; empty ones stay empty."""
    pairs = ((name, path and str(absolute_path(path))) for name, path in map(_split, values))
    return tuple(f"{name}={path}" if name else path for name, path in pairs)


def _split(value: str) -> tuple[str, str]:
    match = _NAMED.fullmatch(value)
    return (match[1], match[2]) if match else ("", value)


def bytes_of_targets(
    batches: Iterable[Int[np.ndarray, "batch length"]], token_bytes: Integer[np.ndarray, " vocab"] | None
) -> int | None:
    """Returns the bytes of text that all tokens but the first of each sequence stand for.

    Args:
      token_bytes: bytes of each token's text, 0 for a special token; None if they are unknown.
    """
    if token_bytes is None:
        return None
    return sum(int(token_bytes[batch[:, 1:]].sum(dtype=np.int64)) for batch in batches)


def evaluate_sets(
    sets: Sequence[EvaluationSet], evaluate: Callable[[list[np.ndarray]], Mapping[str, Any]]
) -> Evaluation:
    """Returns the evaluation of the first set, and of all by name if they have names.

    `eval_bits_per_byte` is the loss of all targets in bits, those of special tokens included, over the bytes
    of text that the targets stand for. It is left out where the bytes are unknown or none.

    Args:
      sets: at least one.
      evaluate: returns `eval_loss`, in nats a token, and `eval_tokens` of batches.
    """
    found = {one.name: _with_bits(evaluate(one.batches), one.n_bytes) for one in sets}
    first = found[sets[0].name]
    return first | {"eval_sets": found} if sets[0].name else first


def losses_of(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Returns the loss of every set of an evaluation by name; the name of the only one may be empty."""
    sets = evaluation.get("eval_sets", {"": evaluation})
    return {name: one["eval_loss"] for name, one in sets.items()}


def _with_bits(found: Mapping[str, Any], n_bytes: int | None) -> dict[str, Any]:
    if not n_bytes:
        return dict(found)
    bits = found["eval_loss"] * found["eval_tokens"] / math.log(2)
    return {**found, "eval_bits_per_byte": bits / n_bytes, "eval_bytes": n_bytes}
