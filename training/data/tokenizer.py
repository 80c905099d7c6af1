"""Tokenizers of the package `tokenizers`: loaded, or trained as byte-level BPE; the end of a document."""

import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from training.tokenize.documents import Document, Documents

END_OF_DOCUMENT = "<|endoftext|>"
# As named by GPT-2, Llama 3, Llama 2 and T5, Gemma.
_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>")
_BYTES = 256


def load_tokenizer(path: pathlib.Path) -> Any:
    """Returns the `tokenizers.Tokenizer` of a tokenizer.json, set to neither truncate nor pad.

    Raises:
      ValueError: no such file, not a tokenizer, or the package tokenizers is not installed.
    """
    if not path.is_file():
        raise ValueError(f"--tokenizer {path}: no such file; train one with --train-tokenizer --vocab-size N")
    try:
        tokenizer = _tokenizers().Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises no narrower type
        raise ValueError(
            f"--tokenizer {path} is not a tokenizer.json of the package tokenizers: {error}"
        ) from error
    tokenizer.no_truncation()  # which would drop the ends of documents
    tokenizer.no_padding()
    return tokenizer


def end_of_document(tokenizer: Any, name: str | None) -> tuple[str, int]:
    """Returns the token called `name`, or the first of the usual ones that the tokenizer has, and its id.

    Raises:
      ValueError: it has none such.
    """
    for candidate in _ENDS if name is None else (name,):
        found = tokenizer.token_to_id(candidate)
        if found is not None:
            return candidate, found
    if name is not None:
        raise ValueError(f"--eod {name!r}: the tokenizer has no such token")
    raise ValueError(f"--append-eod: the tokenizer has none of {', '.join(_ENDS)}; name its token with --eod")


def tokenizer_path(prefix: str) -> pathlib.Path:
    """Returns where the tokenizer of a dataset lies."""
    return pathlib.Path(prefix + ".tokenizer.json")


def tokenizer_vocab_size(path: pathlib.Path) -> int:
    """Returns the greatest id of a tokenizer.json, and one.

    Raises:
      ValueError: it is not the file of a tokenizer.
    """
    try:
        raw = json.loads(path.read_text())
        vocabulary, added = raw["model"]["vocab"], raw.get("added_tokens", [])
        ids = range(len(vocabulary)) if isinstance(vocabulary, list) else vocabulary.values()
        return 1 + max(max(ids, default=-1), *(token["id"] for token in added), -1)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a tokenizer.json of the package tokenizers: {error!r}") from error


def train_tokenizer(files: Sequence[str], field: str, vocab_size: int, limit: int) -> str:
    """Returns the JSON of a byte-level BPE (GPT-2's pre-tokenizer) trained on the first part of every file.

    A function of the files' contents and order alone. Id 0 is `<|endoftext|>`; the next 256 are the bytes.
    With too little text the vocabulary is smaller than asked for.

    Args:
      files: what `Documents` reads; problems are left out silently here, tokenizing reports them.
      field: that holds the text.
      vocab_size: 257 or more.
      limit: characters to read in all, an equal share of each file.
    Raises:
      ValueError: vocab_size is too small, there is no text, or the package tokenizers is not installed.
    """
    if vocab_size < _BYTES + 1:
        raise ValueError(f"--vocab-size {vocab_size}: a byte-level BPE has at least {_BYTES + 1} tokens")
    library = _tokenizers()
    alphabet = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(files, field, max(limit // len(files), 1)), trainer)
    if tokenizer.get_vocab_size() == _BYTES + 1 < vocab_size:
        raise ValueError("--train-tokenizer: the files hold no text to train on")
    return tokenizer.to_str(pretty=True)


def _texts(files: Sequence[str], field: str, share: int) -> Iterator[str]:
    for path in files:
        read = 0
        for item in Documents(path, field):
            if isinstance(item, Document):
                yield item.text
                read += len(item.text)
            if read >= share:
                break


def _tokenizers() -> Any:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # else it warns when processes are started
    try:
        import tokenizers
    except ImportError as error:
        raise ValueError("tokenizing needs the package tokenizers: pip install 'mxjax[data]'") from error
    return tokenizers
