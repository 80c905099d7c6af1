"""The bytes of text that each token of a tokenizer stands for, read from its tokenizer.json.

The package tokenizers is not needed. Tokens are counted as its decoders write them: a byte-level one has a
character for each byte; one with byte fallback has <0x0A> for a byte, and ▁ for a space.
"""

import pathlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Int64

from models.received import parse_json
from training.data.tokenizer import read_tokenizer, tokenizer_vocab_size

TokenBytes = Int64[np.ndarray, " vocab"]

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SPACES = {"ByteFallback", "Replace", "Fuse", "Strip", "Metaspace"}  # Llama 2's and Gemma's decoders


def token_bytes_of(path: pathlib.Path, vocab_size: int) -> TokenBytes | None:
    """Returns the bytes of each token's text: 0 for special tokens and for ids that no token has.

    Args:
      path: a tokenizer.json.
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
