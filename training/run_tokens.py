"""A check that text is not read as bytes for a run that was trained on a tokenizer's tokens."""

import pathlib
import shlex

from training.data.megatron import is_indexed, parse_blend
from training.data.tokenizer import tokenizer_path
from training.resume import begun_run


def check_tokens_of(run: pathlib.Path, flag: str, path: str) -> None:
    """Raises ValueError if `path` is text and the run was trained on tokenized data."""
    begun = begun_run(run)
    if begun is None or not begun.data.data or not is_indexed(begun.data.data):
        return
    if pathlib.Path(path).exists() and not is_indexed([path]):
        prefix = parse_blend(begun.data.data)[0][0]
        files = f"--input {shlex.quote(path)} --tokenizer {shlex.quote(str(tokenizer_path(prefix)))}"
        raise ValueError(
            f"{flag} {path} is text, which is read as bytes, and {run} was trained on tokens of {prefix}; "
            f"tokenize it likewise: python -m training.tokenize {files} --output PREFIX"
        )
