"""The tokens of a run: what made those of its data must also read and write its text.

config.json keeps a checksum of the tokenizer, because its dataset may move and another take its place.
"""

import json
import pathlib
import shlex
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from models.received import parse_json
from training.config import DataConfig
from training.data.megatron import is_indexed, parse_blend
from training.data.text import VOCAB_SIZE
from training.data.tokenizer import read_tokenizer, tokenizer_path
from training.files import HUGGINGFACE
from training.run.record import model_of, read_run_config
from training.run.resume import begun_config, begun_run


def tokens_checksum(tokenizer: pathlib.Path) -> str:
    """Returns a CRC32 of the vocabulary and the merges, which any version of tokenizers writes alike.

    Raises:
      ValueError: the file is not a tokenizer.json.
    """
    try:
        model = parse_json(read_tokenizer(tokenizer))["model"]
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges", ())]
        tokens = json.dumps([model["vocab"], merges], sort_keys=True)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{tokenizer} is not a tokenizer.json of the package tokenizers: {type(error).__name__}: {error}"
        ) from error
    return f"{zlib.crc32(tokens.encode()):08x}"


def checksum_of_data(data: Sequence[str]) -> str | None:
    """Returns the checksum of the first tokenizer that lies beside --data; None without any."""
    paths = _tokenizers_of(data) if is_indexed(data) else []
    return next((tokens_checksum(path) for path in paths if path.exists()), None)


def checked_tokens(
    data: DataConfig, saved: Mapping[str, Any], source: pathlib.Path | None, init: pathlib.Path | None
) -> str | None:
    """Returns the checksum of the tokens of a run's data; None for text.

    Args:
      saved: config.json of the run at `source`, which goes on; empty for a new one.
      init: the run with whose weights a new one begins.

    Raises:
      ValueError: a dataset, to train or to evaluate on, has other tokens than the run, or than those weights.
    """
    prefixes = parse_blend(data.data)[0] if is_indexed(data.data) else data.data
    whose = f"those that {source} began with"
    if begun_config(saved) is None:
        whose = "the rest of --data and --eval-data"
        if (origin := source or init) is not None:
            for prefix in prefixes or [""]:
                check_tokens_of(origin, "--data", prefix)
    checksum = saved["tokenizer"] if "tokenizer" in saved else checksum_of_data(data.data)
    for path in map(tokenizer_path, (*prefixes, *data.eval_paths.values())):
        if checksum is not None and path.exists() and tokens_checksum(path) != checksum:
            raise ValueError(f"{path} has other tokens than {whose}; tokenize all texts by one --tokenizer")
    return checksum


def _tokenizers_of(data: Sequence[str]) -> list[pathlib.Path]:
    return [tokenizer_path(prefix) for prefix in parse_blend(data)[0]]


def find_tokenizer(run: pathlib.Path, data: Sequence[str]) -> tuple[pathlib.Path | None, list[pathlib.Path]]:
    """Returns a run's tokenizer, if it is there, and the places where it may lie.

    Args:
      run: the run's folder; that of an imported checkpoint holds a tokenizer.
    Raises:
      ValueError: it has other tokens than the run was trained on.
    """
    recorded = read_run_config(run).get("tokenizer")
    beside = _tokenizers_of(data) if recorded is not None or is_indexed(data) else []
    paths = [*beside, run / HUGGINGFACE / "tokenizer.json"]
    found = next((path for path in paths if path.exists()), None)
    if found is not None and recorded is not None and tokens_checksum(found) != recorded:
        raise ValueError(f"{found} has other tokens than those that {run} was trained on; put its own back")
    return found, paths


def own_tokenizer(run: pathlib.Path) -> pathlib.Path | None:
    """Returns the tokenizer that was imported with a run's weights, if any was."""
    path = run / HUGGINGFACE / "tokenizer.json"
    return path if path.exists() else None


def how_to_tokenize(tokenizer: pathlib.Path, text: str = "FILES") -> str:
    """Returns the command that tokenizes text by this tokenizer, in words."""
    files = f"--input {shlex.quote(text)} --tokenizer {shlex.quote(str(tokenizer))}"
    return (
        f"tokenize it by the same tokenizer: python -m training.tokenize {files} --output PREFIX --append-eod"
    )


def check_tokens_of(run: pathlib.Path, flag: str, path: str) -> None:
    """Raises ValueError if the dataset or text at `path` has other tokens than a run was trained on.

    Text is refused, too, where the run's tokens are unknown. Imported weights that have not trained here were
    trained on tokens of their own tokenizer. An empty path stands for the text that is read without the flag.
    """
    if is_indexed([path]):
        _check_tokenizer(run, flag, path)
        return
    if not pathlib.Path(path).exists():
        return
    begun, files = begun_run(run), path or "FILES"
    text = f"{flag} {path} is text, which is" if path else f"without {flag} Python's source is"
    text += " read as bytes"
    if begun is None or not begun.data.data:
        if (tokenizer := own_tokenizer(run)) is not None:
            raise ValueError(f"{text}, and {run} has its own tokenizer; {how_to_tokenize(tokenizer, files)}")
        return
    first = parse_blend(begun.data.data)[0][0]
    if is_indexed(begun.data.data):
        how = how_to_tokenize(tokenizer_path(first), files)
        raise ValueError(f"{text}, and {run} was trained on tokens of {first}; {how}")
    if not pathlib.Path(first).exists() and model_of(read_run_config(run)).vocab_size != VOCAB_SIZE:
        raise ValueError(
            f"{text}, and {first}, which {run} was trained on, is gone, so that its tokens are unknown; "
            "put it back, or of a dataset its .idx"
        )


def _check_tokenizer(run: pathlib.Path, flag: str, path: str) -> None:
    """Raises ValueError if a tokenizer with other tokens made the dataset `path` than the run's data."""
    own, theirs = own_tokenizer(run), tokenizer_path(path)
    recorded = read_run_config(run).get("tokenizer") or (own and tokens_checksum(own))
    if recorded is None or not theirs.exists():
        return
    if tokens_checksum(theirs) != recorded:
        begun = begun_run(run)
        ours = _tokenizers_of(begun.data.data)[0] if begun is not None else own or run
        raise ValueError(
            f"{flag} {path} was tokenized by {theirs}, and {run} was trained on tokens of {ours}; tokenize "
            f"the text again with --tokenizer {shlex.quote(str(ours))}"
        )
