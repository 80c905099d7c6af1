"""Windows of a token stream as batches: a pure function of the seed and the step.

A batch is int32 [batch, seq_len + 1]: inputs are all tokens of a row but the last, targets all but the first.
"""

from collections.abc import Iterator
from typing import Any

import grain
import numpy as np
from jaxtyping import Int32, Integer

from training.config import DataConfig
from training.data.indexed_dataset import check_tokens

Tokens = Integer[np.ndarray, " n"]


class Windows:
    """The windows of a token stream: tokens i * seq_len to (i + 1) * seq_len, inclusive.

    Neighbours share one token.
    """

    def __init__(self, tokens: Integer[np.ndarray, " n"], seq_len: int, part: str):
        self.tokens, self.seq_len = tokens, seq_len
        if not len(self):
            raise ValueError(
                f"a sequence needs --seq-len + 1 = {seq_len + 1} tokens and the {part} data has "
                f"{len(tokens)}; shorten --seq-len or give more text"
            )

    def __len__(self) -> int:
        return max(len(self.tokens) - 1, 0) // self.seq_len

    def __getitem__(self, index: int) -> Int32[np.ndarray, " length"]:
        start = index * self.seq_len
        return self.tokens[start : start + self.seq_len + 1].astype(np.int32)


def batches(
    tokens: Tokens, config: DataConfig, seed: int, start: int = 0, shard: tuple[int, int] = (0, 1)
) -> grain.DatasetIterator:
    """Returns an endless iterator over batches, read ahead by grain.

    Each epoch visits every window once, in an order drawn from `seed`. The iterator's position is the step:
    `get_state()["next_index"]`.

    Args:
      tokens: the token stream.
      config: batch size and sequence length.
      seed: draws the order.
      start: number of steps already taken.
      shard: (i, n) yields the i-th of n equal parts of each batch.
    Raises:
      ValueError: too few tokens for one sequence, or batch_size is not a multiple of n.
    """
    index, count = shard
    rows_of_a_shard(config.batch_size, count)
    windows = Windows(tokens, config.seq_len, "training")
    dataset = shuffled_batches(windows, seed, config.batch_size)
    if count > 1:
        dataset = dataset.map(lambda batch: np.split(batch, count)[index])
    iterator = iter(dataset.to_iter_dataset())
    iterator.set_state({"next_index": start})
    return iterator


def shuffled_batches(source: Any, seed: int, batch_size: int) -> grain.MapDataset:
    """Returns the batches of a source, shuffled anew in each epoch."""
    # Practically endless. An endless dataset overflows grain's count when a batch is one sequence.
    epochs = 2**62 // max(len(source), 1)
    return grain.MapDataset.source(source).shuffle(seed=seed).repeat(epochs).batch(batch_size)


def evaluation_batches(
    tokens: Integer[np.ndarray, " n"],
    config: DataConfig,
    n_batches: int,
    vocab_size: int | None = None,
    *,
    n_sequences: int | None = None,
) -> Iterator[Int32[np.ndarray, "batch length"]]:
    """Yields the first n_batches batches of the tokens, in order; the last may be short.

    Args:
      tokens: the token stream.
      config: batch size and sequence length.
      n_batches: how many batches to yield.
      vocab_size: checks the token ids against this vocabulary.
      n_sequences: yields exactly this many sequences instead of n_batches.
    Raises:
      ValueError: too few tokens, or an id of vocab_size or greater.
    """
    windows = Windows(tokens, config.seq_len, "validation")
    end = min(len(windows), n_batches * config.batch_size)
    if n_sequences is not None:
        end = n_sequences
        if end > len(windows):
            raise ValueError(
                f"--eval-sequences {end} asks for more than the {len(windows)} of the validation data"
            )
    for start in range(0, end, config.batch_size):
        batch = np.stack([windows[i] for i in range(start, min(start + config.batch_size, end))])
        if vocab_size is not None:
            check_tokens(batch.ravel(), vocab_size, "the validation data")
        yield batch


def rows_of_a_shard(batch_size: int, count: int) -> int:
    """Returns the number of sequences of a batch that each of `count` processes reads.

    Raises:
      ValueError: `count` does not divide the batch.
    """
    if batch_size % count:
        raise ValueError(f"--batch-size {batch_size} must be a multiple of the {count} processes")
    return batch_size // count
