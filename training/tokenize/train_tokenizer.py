"""Training of a tokenizer: byte-level BPE with the package tokenizers."""

from collections.abc import Iterator, Sequence

from training.data.tokenizer import END_OF_DOCUMENT, tokenizers_library
from training.tokenize.documents import Document, Documents

_BYTES = 256


def train_tokenizer(files: Sequence[str], field: str, vocab_size: int, limit: int) -> str:
    """Returns the JSON of a byte-level BPE (GPT-2's pre-tokenizer), trained on the start of every file.

    It depends only on the files' contents and order. Id 0 is `<|endoftext|>`; the next 256 are the bytes.
    Too little text gives a smaller vocabulary.

    Args:
      files: files for `Documents`; malformed lines are ignored here and reported when tokenizing.
      field: field that holds the text.
      vocab_size: 257 or more.
      limit: characters to read in total, an equal share of each file.
    Raises:
      ValueError: vocab_size is too small, or there is no text.
      MissingExtraError: the package tokenizers is not installed.
    """
    if vocab_size < _BYTES + 1:
        raise ValueError(f"--vocab-size {vocab_size}: a byte-level BPE has at least {_BYTES + 1} tokens")
    library = tokenizers_library()
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
        raise ValueError(
            f"--train-tokenizer: the files hold no text to train on; in JSON it is read from {field!r}, or "
            "from the field that --field names"
        )
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
