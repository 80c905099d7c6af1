"""Megatron indexed datasets as training data: one or several, read in megatron-core's order."""

import dataclasses
import math
import os
import zlib
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from training.config import DataConfig
from training.data.document_order import Blend, GPTDataset, Rows, blend_samples
from training.data.indexed_dataset import IndexedDataset, Tokens
from training.data.text import rows_of_a_shard
from training.data.tokenizer import read_tokenizer, tokenizer_path, tokenizer_vocab_size

_TRAIN_SHARE = 0.95  # of the documents, without --eval-data: Megatron's split 95,5
_VOCABULARY_MULTIPLE = 128  # Megatron's make_vocab_size_divisible_by
_CHECKED_TOKENS = 2**22
_READ_AHEAD = grain.ReadOptions(num_threads=8, prefetch_buffer_size=16)  # batches; grain's own is 500


def is_indexed(data: Sequence[str]) -> bool:
    """Returns whether `--data` names indexed datasets: several names, or one with a .idx or .bin file."""
    return len(data) > 1 or any(
        os.path.exists(prefix + suffix) for prefix in data for suffix in (".idx", ".bin")
    )


def parse_blend(data: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Returns prefixes and weights of `PREFIX...` or `WEIGHT PREFIX WEIGHT PREFIX...`.

    Weights are None in the first form, which mixes datasets by size.

    Raises:
      ValueError: a weight is missing, not positive or not finite.
    """
    numbers = [_number(value) for value in data]
    if all(number is None for number in numbers):
        return list(data), None
    weights = [number for number in numbers[::2] if number is not None and number > 0]
    alternate = len(weights) * 2 == len(data) and all(number is None for number in numbers[1::2])
    if not alternate or not math.isfinite(sum(weights)):
        raise ValueError(
            "--data takes PREFIX... or WEIGHT PREFIX WEIGHT PREFIX..., with positive, finite weights; "
            f"got {' '.join(data)}"
        )
    return list(data[1::2]), weights


@dataclasses.dataclass(frozen=True)
class MegatronCorpus:
    """Indexed datasets to train on, and tokens to evaluate on.

    Attributes:
      datasets, documents: the training datasets, and the range of documents to read from each.
      weights: weights of the datasets in the blend; None mixes by size.
      validation: the tokens to evaluate on, read in order.
      vocab_size: vocabulary of the model; a larger token id is an error.
    """

    datasets: tuple[IndexedDataset, ...]
    documents: tuple[range, ...]
    weights: tuple[float, ...] | None
    validation: Tokens
    vocab_size: int

    @property
    def source(self) -> str:
        """The prefixes with their weights."""
        prefixes = [dataset.prefix for dataset in self.datasets]
        weights = self.weights or [None] * len(prefixes)
        return ", ".join(p if w is None else f"{w:g} x {p}" for p, w in zip(prefixes, weights, strict=True))

    @property
    def train_tokens(self) -> int:
        """Number of training tokens."""
        parts = zip(self.datasets, self.documents, strict=True)
        return sum(int(d.lengths[r.start : r.stop].sum(dtype=np.int64)) for d, r in parts)

    @property
    def document_end(self) -> int | None:
        """The token that ends each document of all datasets; None if there is none."""
        ends = {dataset.document_end() for dataset in self.datasets}
        return ends.pop() if len(ends) == 1 else None

    @property
    def facts(self) -> dict[str, int | str]:
        """The identity of the data: source, sizes, and a checksum of lengths and pieces of the tokens."""
        checksums = "".join(dataset.checksum() for dataset in self.datasets)
        crc = zlib.crc32(
            np.ascontiguousarray(self.validation[:_CHECKED_TOKENS]), zlib.crc32(checksums.encode())
        )
        sizes = {"train_tokens": self.train_tokens, "validation_tokens": len(self.validation)}
        return {"source": self.source, **sizes, "crc32": f"{crc:08x}"}

    def samples(self, seq_len: int, seed: int, num_samples: int) -> "GPTDataset | Blend":
        """Returns the sequences of a run, int32 [seq_len + 1] each, by index.

        Raises:
          ValueError: the datasets hold fewer than num_samples.
        """
        if len(self.datasets) == 1 and self.weights is None:
            return GPTDataset(
                self.datasets[0], self.documents[0], self.vocab_size, seq_len, seed, num_samples
            )
        wanted, size = [None] * len(self.datasets), num_samples
        if self.weights is not None:
            wanted, size = blend_samples(self.weights, num_samples)
        parts = [
            GPTDataset(dataset, documents, self.vocab_size, seq_len, seed, n)
            for dataset, documents, n in zip(self.datasets, self.documents, wanted, strict=True)
        ]
        weights = self.weights or tuple(len(part) for part in parts)
        if self.weights is None and num_samples > sum(weights):
            raise ValueError(
                f"{num_samples:,} sequences are wanted and one epoch of the datasets has {sum(weights):,}; "
                "to read more, give weights, as in --data 0.5 A 0.5 B"
            )
        return Blend(parts, weights, size)

    def batches(
        self, config: DataConfig, seed: int, steps: int, start: int = 0, shard: tuple[int, int] = (0, 1)
    ) -> grain.DatasetIterator:
        """Returns an iterator over the batches int32 [batch, seq_len + 1] of a run, read ahead by grain.

        Step s, from 0, takes samples s * batch_size to (s + 1) * batch_size - 1. The iterator's position is
        the step: `get_state()["next_index"]`.

        Args:
          steps: length of the run, which decides the number of epochs and so the order.
          start: number of steps already taken.
          shard: (i, n) yields the i-th of n equal parts of each batch.
        Raises:
          ValueError: batch_size is not a multiple of n, or the data holds too few sequences.
        """
        index, count = shard
        rows = rows_of_a_shard(config.batch_size, count)
        samples = self.samples(config.seq_len, seed, steps * config.batch_size)
        source = Rows(samples, steps, config.batch_size, index, count)
        dataset = grain.MapDataset.source(source).batch(rows)
        iterator = iter(dataset.to_iter_dataset(_READ_AHEAD))
        iterator.set_state({"next_index": start})
        return iterator

    def order(self, config: DataConfig, seed: int, steps: int) -> str:
        """Returns the number of epochs that the data is shuffled for, in words.

        Runs for which it is equal read the same samples, as far as both go.
        """
        samples = self.samples(config.seq_len, seed, steps * config.batch_size)
        parts = samples.datasets if isinstance(samples, Blend) else [samples]
        orders = [part.order for part in parts]
        return ", ".join(
            f"{o.epochs} epoch{'s' * (o.epochs != 1)}"
            + (" with the last apart" if o.separate_final_epoch else "")
            for o in orders
        )

    def batch_indices(self, config: DataConfig, seed: int, steps: int, step: int) -> dict[str, list[Any]]:
        """Returns the samples of a step's batch, counted from 0, with their datasets and documents."""
        samples = self.samples(config.seq_len, seed, steps * config.batch_size)
        indices = range(step * config.batch_size, (step + 1) * config.batch_size)
        sources = [samples.source(index) for index in indices]
        return {
            "samples": list(indices),
            "datasets": [prefix for prefix, _ in sources],
            "documents": [documents for _, documents in sources],
        }


def load_megatron(config: DataConfig, model_vocab_size: int) -> MegatronCorpus:
    """Opens and checks the datasets that a configuration names, in seconds whatever their size.

    The first of several `eval_data` becomes `validation`. Without it the last 5 % of the documents are held
    out for evaluation: Megatron's split 95,5.
    The vocabulary is `vocab_size`, else that of PREFIX.tokenizer.json rounded up to a multiple of 128, else
    model_vocab_size.

    Raises:
      ValueError: broken files, ids that exceed the vocabulary, different tokenizers, or no evaluation data.
    """
    prefixes, weights = parse_blend(config.data)
    if not config.eval_paths and len(prefixes) > 1:
        raise ValueError("--data names several datasets: name one to evaluate on, as --eval-data PREFIX")
    datasets = tuple(IndexedDataset(prefix) for prefix in prefixes)
    held_out = [IndexedDataset(prefix) for prefix in config.eval_paths.values()]
    vocab_size = _vocabulary([d.prefix for d in (*datasets, *held_out)], config.vocab_size, model_vocab_size)
    for dataset in (*datasets, *held_out):
        dataset.check_ids(vocab_size)
    documents, validation = tuple(range(len(d)) for d in datasets), held_out[0].tokens if held_out else None
    if validation is None:
        documents, validation = _split(datasets[0])
    return MegatronCorpus(
        datasets, documents, None if weights is None else tuple(weights), validation, vocab_size
    )


def load_validation(prefix: str, vocab_size: int, whole: bool) -> Tokens:
    """Returns the tokens of a dataset's last 5 % of documents, or of all; ids are checked.

    Raises:
      ValueError: broken files, or ids of vocab_size or greater.
    """
    dataset = IndexedDataset(prefix)
    dataset.check_ids(vocab_size)
    return dataset.tokens if whole else _split(dataset)[1]


def _vocabulary(prefixes: list[str], given: int | None, model_vocab_size: int) -> int:
    if given is not None:
        return given
    paths = [path for path in map(tokenizer_path, prefixes) if path.exists()]
    if len({read_tokenizer(path) for path in paths}) > 1:
        raise ValueError(
            f"the datasets have different tokenizers: {', '.join(map(str, paths))}; tokenize them alike"
        )
    if not paths:
        return model_vocab_size
    return -(-tokenizer_vocab_size(paths[0]) // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE


def _split(dataset: IndexedDataset) -> tuple[tuple[range, ...], Tokens]:
    """Returns the documents to train on, and the tokens of the other documents.

    Raises:
      ValueError: the dataset has too few documents to keep one for evaluation.
    """
    cut = round(_TRAIN_SHARE * len(dataset))
    if cut == len(dataset):
        raise ValueError(
            f"{dataset.prefix} has {cut} document{'s' if cut > 1 else ''}, too few to keep the last 5 % of "
            "them for evaluation; name data to evaluate on with --eval-data, or tokenize the text as more "
            "documents (a .txt file is one, each line of a .jsonl file is one)"
        )
    return (range(cut),), dataset.tokens[int(dataset.offsets[cut]) // dataset.tokens.itemsize :]


def _number(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None
