"""The data that the flags --data and --eval-data name: text or tokenized datasets."""

import dataclasses
import pathlib

import numpy as np
from jaxtyping import Integer

from models.documents import Documents
from training.config import DataConfig
from training.data.megatron import MegatronCorpus, is_indexed, load_megatron, load_validation
from training.data.text import VOCAB_SIZE, TextCorpus, load_text


def load_data(config: DataConfig, model_vocab_size: int) -> TextCorpus | MegatronCorpus:
    """Returns the data to train and evaluate on.

    Args:
      config: names the data; `data` and `eval_data` are both text or both tokenized.
      model_vocab_size: vocabulary of the published model, for datasets without a tokenizer.
    Raises:
      ValueError: the data cannot be read, or token ids exceed the vocabulary.
    """
    if is_indexed(config.data):
        held_out = config.eval_data
        if held_out is not None and not is_indexed([held_out]) and pathlib.Path(held_out).exists():
            raise ValueError(
                f"--eval-data {held_out} is text and --data is tokenized; tokenize both or neither"
            )
        return load_megatron(config, model_vocab_size)
    corpus = load_text(pathlib.Path(config.data[0]) if config.data else None)
    if config.eval_data is not None:
        if is_indexed([config.eval_data]):
            raise ValueError(
                f"--eval-data {config.eval_data} is tokenized and --data is text; tokenize both or neither"
            )
        held_out = load_text(pathlib.Path(config.eval_data), "--eval-data")
        whole = (np.concatenate([c.train, c.validation]) for c in (corpus, held_out))
        corpus = TextCorpus(*whole, source=corpus.source)
    else:
        corpus = _with_validation(corpus, config.seq_len + 1)
    if config.vocab_size is not None and config.vocab_size < VOCAB_SIZE:
        raise ValueError(
            f"text is read as {VOCAB_SIZE} ids, which --vocab-size {config.vocab_size} does not hold"
        )
    return dataclasses.replace(corpus, vocab_size=config.vocab_size or VOCAB_SIZE)


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


def load_held_out(path: str, vocab_size: int, whole: bool, seq_len: int) -> Integer[np.ndarray, " n"]:
    """Returns the validation part of a text or dataset, or the whole of it.

    A text is split as a run with sequences of `seq_len` splits it.

    Raises:
      ValueError: the data cannot be read or is too short to split, or token ids exceed the vocabulary.
    """
    if not path:
        raise ValueError("--data and --eval-data name a file, folder or dataset, got an empty name")
    if is_indexed([path]):
        return load_validation(path, vocab_size, whole)
    corpus = load_text(pathlib.Path(path), "--eval-data" if whole else "--data")
    if whole:
        return np.concatenate([corpus.train, corpus.validation])
    return _with_validation(corpus, seq_len + 1).validation
