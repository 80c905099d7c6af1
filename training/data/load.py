"""The data that the flags --data and --eval-data name: text or tokenized datasets."""

import dataclasses
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from jaxtyping import Integer

from models.attention.documents import Documents
from training.config import DataConfig
from training.data.evaluation_sets import EvaluationSet, bytes_of_targets
from training.data.megatron import MegatronCorpus, is_indexed, load_megatron, load_validation, parse_blend
from training.data.text import END_OF_DOCUMENT, VOCAB_SIZE, TextCorpus, evaluation_batches, load_text
from training.data.tokenizer import TokenBytes, token_bytes_of, tokenizer_path

Tokens = Integer[np.ndarray, " n"]


def load_data(config: DataConfig, model_vocab_size: int) -> TextCorpus | MegatronCorpus:
    """Returns the data to train and evaluate on.

    Args:
      config: names the data; `data` and `eval_data` are both text or both tokenized.
      model_vocab_size: vocabulary of the published model, for datasets without a tokenizer.
    Raises:
      ValueError: the data cannot be read, or token ids exceed the vocabulary.
    """
    paths = list(config.eval_paths.values())
    if is_indexed(config.data):
        for path in paths:
            if not is_indexed([path]) and pathlib.Path(path).exists():
                raise ValueError(
                    f"--eval-data {path} is text and --data is tokenized; tokenize both or neither"
                )
        return load_megatron(config, model_vocab_size)
    corpus = load_text(pathlib.Path(config.data[0]) if config.data else None)
    for path in paths:
        if is_indexed([path]):
            raise ValueError(f"--eval-data {path} is tokenized and --data is text; tokenize both or neither")
    if paths:
        held_out = load_text(pathlib.Path(paths[0]), "--eval-data")
        whole = (np.concatenate([c.train, c.validation]) for c in (corpus, held_out))
        corpus = TextCorpus(*whole, source=corpus.source)
    else:
        corpus = _with_validation(corpus, config.seq_len + 1)
    if config.vocab_size is not None and config.vocab_size < VOCAB_SIZE:
        raise ValueError(
            f"text is read as {VOCAB_SIZE} ids, 256 bytes and the end of a document, and the model has "
            f"{config.vocab_size}; raise --vocab-size, or tokenize the text by the model's own tokenizer"
        )
    return dataclasses.replace(corpus, vocab_size=config.vocab_size or VOCAB_SIZE)


def held_out_tokens(data: DataConfig, corpus: TextCorpus | MegatronCorpus) -> dict[str, Tokens]:
    """Returns the tokens of a run's evaluation sets by name: the corpus's own, then other --eval-data.

    Raises:
      ValueError: one cannot be read, or has token ids that exceed the vocabulary.
    """
    paths, size = data.eval_paths, corpus.vocab_size
    first, *others = paths or [""]
    read = {name: load_held_out(paths[name], size, whole=True, seq_len=data.seq_len) for name in others}
    return {first: corpus.validation} | read


def make_sets(
    tokens: Mapping[str, Tokens],
    data: DataConfig,
    n_batches: int,
    vocab_size: int,
    n_sequences: int | None,
    paths: Iterable[str] | None = None,
) -> tuple[EvaluationSet, ...]:
    """Returns evaluation sets with the bytes of their targets; see `evaluation_batches`.

    Args:
      tokens: the tokens of each set, by name.
      paths: where they come from. Default: --eval-data, or else --data.
    Raises:
      ValueError: too few tokens, or an id of vocab_size or greater.
    """
    trained_on = parse_blend(data.data)[0] if is_indexed(data.data) else data.data
    own = data.eval_paths.values() if paths is None else paths
    token_bytes, found = _token_bytes([*own, *trained_on], vocab_size), []
    for name, stream in tokens.items():
        options = {"n_sequences": n_sequences, "part": name or "validation"}
        batches = list(evaluation_batches(stream, data, n_batches, vocab_size, **options))
        found.append(EvaluationSet(name, batches, bytes_of_targets(batches, token_bytes)))
    return tuple(found)


def _token_bytes(paths: Sequence[str], vocab_size: int) -> TokenBytes | None:
    """Returns the bytes of each token's text: by the first tokenizer beside a dataset, or those of text."""
    if not any(is_indexed([path]) for path in paths):
        return (np.arange(vocab_size) < END_OF_DOCUMENT).astype(np.int64)
    tokenizers = [path for path in map(tokenizer_path, paths) if path.exists()]
    return token_bytes_of(tokenizers[0], vocab_size) if tokenizers else None


def documents_of(config: DataConfig, corpus: TextCorpus | MegatronCorpus) -> Documents | None:
    """Returns the documents that attention keeps apart; None without a mask.

    Raises:
      ValueError: the flags ask for documents whose ends the data does not mark.
    """
    end = None if config.document_mask == "off" else corpus.document_end
    if end is None and (config.document_mask == "on" or config.restart_positions):
        flag = "--restart-positions" if config.restart_positions else "--document-mask on"
        raise ValueError(
            f"{flag}: no token ends every document of {corpus.source}, and nothing else; tokenize the text "
            f"with --append-eod, or leave {flag} out"
        )
    return None if end is None else Documents(end, config.restart_positions)


def _with_validation(corpus: TextCorpus, fewest: int) -> TextCorpus:
    """Returns a text whose two parts have at least `fewest` tokens; the source says if they were moved.

    Raises:
      ValueError: the text is too short for both.
    """
    if min(len(corpus.train), len(corpus.validation)) >= fewest:
        return corpus
    tokens = np.concatenate([corpus.train, corpus.validation])
    if len(tokens) < 2 * fewest:
        raise ValueError(
            f"--data {corpus.source} has {len(tokens):,} tokens, and --seq-len + 1 = {fewest:,} are needed "
            "to train on and as many to evaluate on; shorten --seq-len, or give more text or --eval-data"
        )
    source = f"{corpus.source} (5 % of it are too few, so its last {fewest:,} tokens are evaluated)"
    return TextCorpus(tokens[:-fewest], tokens[-fewest:], source)


def load_held_out(path: str, vocab_size: int, whole: bool, seq_len: int, flag: str | None = None) -> Tokens:
    """Returns the validation part of a text or dataset, or the whole of it.

    A text is split as a run with sequences of `seq_len` splits it.

    Args:
      flag: the flag that names the data, for messages. Default: --eval-data for the whole, else --data.
    Raises:
      ValueError: the data cannot be read or is too short to split, or token ids exceed the vocabulary.
    """
    flag = flag or ("--eval-data" if whole else "--data")
    if not path:
        raise ValueError(f"{flag} names a file, folder or dataset, got an empty name")
    if is_indexed([path]):
        return load_validation(path, vocab_size, whole)
    corpus = load_text(pathlib.Path(path), flag)
    if whole:
        return np.concatenate([corpus.train, corpus.validation])
    return _with_validation(corpus, seq_len + 1).validation
