"""Tokenizers of the package `tokenizers`: loading, vocabulary, the end of a document, bytes of tokens.

The bytes of text that a token stands for are read from tokenizer.json, as its decoders write them: a
byte-level one has a character for each byte; one with byte fallback has <0x0A> for a byte, and ▁ for a space.
"""

import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Int64

from models.received import parse_json, read_object, read_text
from training.process.start import require

END_OF_DOCUMENT = "<|endoftext|>"
# Names in GPT-2, Llama 3, Llama 2 and T5, Gemma.
_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>")
_LARGEST = 2**31  # bytes of a tokenizer.json; Llama 3's has 17 million


def read_tokenizer(path: pathlib.Path, name: str | None = None) -> str:
    """Returns the text of a tokenizer.json, without understanding it; see `models.received.read_text`."""
    return read_text(path, name, largest=_LARGEST)


def load_tokenizer(path: pathlib.Path) -> Any:
    """Returns the `tokenizers.Tokenizer` of a tokenizer.json, without truncation and padding.

    Raises:
      ValueError: there is no such file, or it is not a tokenizer.
      MissingExtraError: the package tokenizers is not installed.
    """
    try:
        text = read_tokenizer(path, f"--tokenizer {path}")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise ValueError(
            f"--tokenizer {path}: no such file; train one with --train-tokenizer --vocab-size N"
        ) from None
    library = tokenizers_library()
    try:
        tokenizer = library.Tokenizer.from_str(text)
    except BaseException as error:  # the package raises no narrower type, and panics in Rust are no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(
            f"--tokenizer {path} is not a tokenizer.json of the package tokenizers: {error}"
        ) from error
    tokenizer.no_truncation()  # truncation would drop the ends of documents
    tokenizer.no_padding()
    return tokenizer


def end_of_document(tokenizer: Any, name: str | None) -> tuple[str, int]:
    """Returns the token that ends a document, and its id: `name`, or the first usual one that exists.

    Raises:
      ValueError: the tokenizer has no such token.
    """
    for candidate in _ENDS if name is None else (name,):
        found = tokenizer.token_to_id(candidate)
        if found is not None:
            return candidate, found
    if name is not None:
        raise ValueError(f"--eod {name!r}: the tokenizer has no such token")
    raise ValueError(f"--append-eod: the tokenizer has none of {', '.join(_ENDS)}; name its token with --eod")


class SpecialTokens:
    """The special tokens of a tokenizer, whose names a text may spell.

    Attributes:
      ids: their ids by name.
    """

    def __init__(self, tokenizer: Any, end: int | None):
        """Takes the tokens that the tokenizer marks as special, and `end`, which ends a document."""
        added = tokenizer.get_added_tokens_decoder().items()
        self.ids: dict[str, int] = {token.content: i for i, token in added if token.special}
        if end is not None:
            self.ids[tokenizer.id_to_token(end)] = end
        longest_first = sorted(self.ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def spelled(self, text: str) -> set[str]:
        """Returns the names of those that a text spells."""
        return set(self._pattern.findall(text))


def tokenizer_path(prefix: str) -> pathlib.Path:
    """Returns the path of a dataset's tokenizer."""
    return pathlib.Path(prefix + ".tokenizer.json")


def tokenizer_vocab_size(path: pathlib.Path) -> int:
    """Returns the largest token id of a tokenizer.json plus one.

    Raises:
      ValueError: the file is not a tokenizer, or has ids that no dataset can hold.
    """
    try:
        raw = read_object(path, largest=_LARGEST)
        vocabulary, added = raw["model"]["vocab"], raw.get("added_tokens", [])
        ids = list(range(len(vocabulary)) if isinstance(vocabulary, list) else vocabulary.values())
        ids += [token["id"] for token in added]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path} is not a tokenizer.json of the package tokenizers: {type(error).__name__}: {error}"
        ) from error
    if not ids or any(type(i) is not int or not 0 <= i < 2**31 for i in ids):
        raise ValueError(f"{path} has no tokens, or ids that are not integers from 0 to 2**31 - 1")
    return 1 + max(ids)


def tokenizers_library() -> Any:
    """Returns the package tokenizers; raises MissingExtraError if it is not installed."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # avoids a warning when processes start
    return require("data", "tokenizing", "tokenizers")


TokenBytes = Int64[np.ndarray, " vocab"]

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SPACES = {"ByteFallback", "Replace", "Fuse", "Strip", "Metaspace"}  # Llama 2's and Gemma's decoders


def token_bytes_of(path: pathlib.Path, vocab_size: int) -> TokenBytes | None:
    """Returns the bytes of each token's text: 0 for special tokens and for ids that no token has.

    Args:
      vocab_size: number of ids; the tokenizer may have fewer.
    Returns:
      None if its decoder does not tell the bytes of single tokens, as WordPiece's does not.
    Raises:
      ValueError: the file is not a tokenizer.
    """
    size = tokenizer_vocab_size(path)
    raw = parse_json(read_tokenizer(path))
    kinds = set(_kinds(raw.get("decoder")))
    if "ByteLevel" in kinds:
        length = len
    elif kinds and kinds <= _SPACES:
        length = _bytes_with_spaces
    else:
        return None
    pairs = raw["model"]["vocab"]
    if isinstance(pairs, list):  # Unigram's: each token with its score
        pairs = {token: index for index, (token, _) in enumerate(pairs)}
    found = np.zeros(max(size, vocab_size), np.int64)
    for token, index in pairs.items():
        found[index] = length(token)
    for token in raw.get("added_tokens", []):
        found[token["id"]] = 0 if token.get("special") else len(token["content"].encode())
    return found


def _kinds(decoder: Any) -> Iterator[str]:
    """Yields the types of a decoder, and of those in a sequence."""
    if isinstance(decoder, dict):
        if decoder.get("type") == "Sequence":
            for part in decoder["decoders"]:
                yield from _kinds(part)
        else:
            spaces = decoder.get("pattern") == {"String": "▁"} and decoder.get("content") == " "
            yield decoder.get("type", "") if spaces or decoder.get("type") != "Replace" else "another"


def _bytes_with_spaces(token: str) -> int:
    return 1 if _BYTE.fullmatch(token) else len(token.replace("▁", " ").encode())
