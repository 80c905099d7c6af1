"""Tokenized corpora: Megatron indexed datasets, one or several, read in megatron-core's order."""

import dataclasses
import os
import zlib
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np
from jaxtyping import Int32

from training.config import DataConfig
from training.data.indexed_dataset import IndexedDataset, Tokens, check_tokens
from training.data.megatron_order import BlendOrder, GPTOrder, blend_samples
from training.data.tokenizer import tokenizer_path, tokenizer_vocab_size

_TRAIN_SHARE = 0.95  # of the documents, when none are named to evaluate on: Megatron's split 95,5
_VOCABULARY_MULTIPLE = 128  # Megatron's make_vocab_size_divisible_by
_ENTROPY_TOKENS = 2**22
_READ_AHEAD = grain.ReadOptions(num_threads=8, prefetch_buffer_size=16)  # batches; grain's own is 500


def is_packed(data: Sequence[str]) -> bool:
    """Returns whether `--data` names indexed datasets: several, or one of which a file is there."""
    return len(data) > 1 or any(
        os.path.exists(prefix + suffix) for prefix in data for suffix in (".idx", ".bin")
    )


def parse_blend(data: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Returns the prefixes and weights of `PREFIX...` (None: by size) or `WEIGHT PREFIX WEIGHT PREFIX...`.

    Raises:
      ValueError: a weight that is missing or not positive.
    """
    numbers = [_number(value) for value in data]
    if all(number is None for number in numbers):
        return list(data), None
    weights = [number for number in numbers[::2] if number is not None and number > 0]
    if len(data) % 2 or len(weights) * 2 != len(data) or any(number is not None for number in numbers[1::2]):
        raise ValueError(f"--data takes PREFIX... or WEIGHT PREFIX WEIGHT PREFIX..., got {' '.join(data)}")
    return list(data[1::2]), weights


@dataclasses.dataclass(frozen=True)
class PackedCorpus:
    """Indexed datasets to train on, and one to evaluate on.

    Attributes:
      datasets, documents: what to train on, and the part of each.
      weights: of the datasets in the blend; None is by size.
      validation: the tokens to evaluate on, read in order.
      vocab_size: of the model; no id is read that is not below it.
    """

    datasets: tuple[IndexedDataset, ...]
    documents: tuple[range, ...]
    weights: tuple[float, ...] | None
    validation: Tokens
    vocab_size: int

    @property
    def source(self) -> str:
        """The prefixes, with their weights."""
        prefixes = [dataset.prefix for dataset in self.datasets]
        weights = self.weights or [None] * len(prefixes)
        return ", ".join(p if w is None else f"{w:g} x {p}" for p, w in zip(prefixes, weights, strict=True))

    @property
    def train_tokens(self) -> int:
        """How many tokens there are to train on."""
        parts = zip(self.datasets, self.documents, strict=True)
        return sum(int(d.lengths[r.start : r.stop].sum(dtype=np.int64)) for d, r in parts)

    @property
    def facts(self) -> dict[str, int | str]:
        """What identifies the data: source, sizes, a checksum of the lengths and of pieces of the tokens."""
        checksums = "".join(dataset.checksum() for dataset in self.datasets)
        crc = zlib.crc32(
            np.ascontiguousarray(self.validation[:_ENTROPY_TOKENS]), zlib.crc32(checksums.encode())
        )
        sizes = {"train_tokens": self.train_tokens, "validation_tokens": len(self.validation)}
        return {"source": self.source, **sizes, "crc32": f"{crc:08x}"}

    def unigram_entropy(self) -> float:
        """Returns the entropy in nats of the first 4 M validation tokens: the loss without any context."""
        counts = np.bincount(self.validation[:_ENTROPY_TOKENS])
        frequency = counts[counts > 0] / counts.sum()
        return float(-np.sum(frequency * np.log(frequency)))

    def samples(self, seq_len: int, seed: int, num_samples: int) -> "GPTDataset | Blend":
        """Returns the sequences of a run, random access: int32 [seq_len + 1] each.

        Raises:
          ValueError: the datasets give fewer than num_samples.
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
        """Returns the batches int32 [batch, seq_len + 1] of a run from step `start` on, read ahead by grain.

        Step s, from 0, takes samples s * batch_size to (s + 1) * batch_size - 1. The iterator's position is
        one integer, the step: `get_state()["next_index"]`.

        Args:
          config: batch size and sequence length.
          seed: of the order.
          steps: of the whole run: the epochs, and so the order, depend on its length.
          start: the steps already taken.
          shard: (i, n) reads only the i-th of n equal parts of each batch, for the i-th of n processes.
        Raises:
          ValueError: batch_size is no multiple of n, or the data cannot give the sequences.
        """
        index, count = shard
        rows = rows_of_a_shard(config.batch_size, count)
        samples = self.samples(config.seq_len, seed, steps * config.batch_size)
        source = Rows(samples, steps, config.batch_size, index, count)
        dataset = grain.MapDataset.source(source).batch(rows)
        iterator = iter(dataset.to_iter_dataset(_READ_AHEAD))
        iterator.set_state({"next_index": start})
        return iterator

    def batch_indices(self, config: DataConfig, seed: int, steps: int, step: int) -> dict[str, list[Any]]:
        """Returns the samples of a step's batch, counted from 0, and of each its dataset and documents."""
        samples = self.samples(config.seq_len, seed, steps * config.batch_size)
        indices = range(step * config.batch_size, (step + 1) * config.batch_size)
        sources = [samples.source(index) for index in indices]
        return {
            "samples": list(indices),
            "datasets": [prefix for prefix, _ in sources],
            "documents": [documents for _, documents in sources],
        }


class GPTDataset:
    """The samples of one dataset in megatron-core's order: int32 [seq_len + 1] each.

    Pickles as its arguments, so that grain's worker processes map the same files and make the order anew.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        documents: range,
        vocab_size: int,
        seq_len: int,
        seed: int,
        num_samples: int | None,
    ):
        """See `GPTOrder`; no sample with an id of vocab_size or greater is given."""
        self._arguments = (dataset, documents, vocab_size, seq_len, seed, num_samples)
        self.dataset, self._vocab_size = dataset, vocab_size
        self.order = GPTOrder(dataset.lengths, seq_len, seed, num_samples, documents)

    def __reduce__(self):
        return type(self), self._arguments

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Int32[np.ndarray, " length"]:
        documents, start, stop = self.order.pieces(index)
        begins = self.dataset.offsets[documents] // self.dataset.dtype.itemsize
        ends = begins + self.dataset.lengths[documents]
        ends[-1] = begins[-1] + stop
        begins[0] += start
        sample = self.dataset.gather(begins.tolist(), ends.tolist())
        check_tokens(sample, self._vocab_size, f"sample {index} of {self.dataset.prefix}")
        return sample.astype(np.int32)

    def source(self, index: int) -> tuple[str, list[int]]:
        """Returns the dataset's prefix and the documents that a sample is of."""
        return self.dataset.prefix, self.order.pieces(index)[0].tolist()


class Blend:
    """The samples of several datasets, in the order of megatron-core's BlendedDataset."""

    def __init__(self, datasets: Sequence[GPTDataset], weights: Sequence[float], size: int):
        """Raises ValueError if a dataset has fewer samples than the weights ask of it."""
        self._arguments = (datasets, weights, size)
        self.datasets, self.order = datasets, BlendOrder(weights, size)
        self.order.check([len(d) for d in datasets], [d.dataset.prefix for d in datasets])

    def __reduce__(self):
        return type(self), self._arguments

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Int32[np.ndarray, " length"]:
        dataset, sample = self.order[index]
        return self.datasets[dataset][sample]

    def source(self, index: int) -> tuple[str, list[int]]:
        """Returns the prefix of the dataset, and the documents, that a sample is of."""
        dataset, sample = self.order[index]
        return self.datasets[dataset].source(sample)


@dataclasses.dataclass(frozen=True)
class Rows:
    """The samples that one of several processes reads, of `steps` batches of `batch_size`."""

    samples: GPTDataset | Blend
    steps: int
    batch_size: int
    shard: int
    count: int

    def __len__(self) -> int:
        return self.steps * self.batch_size // self.count

    def __getitem__(self, index: int) -> Int32[np.ndarray, " length"]:
        share = self.batch_size // self.count
        step, within = divmod(int(index), share)
        return self.samples[step * self.batch_size + self.shard * share + within]


def rows_of_a_shard(batch_size: int, count: int) -> int:
    """Returns how many sequences of a batch each process reads; ValueError unless all the same."""
    if batch_size % count:
        raise ValueError(f"--batch-size {batch_size} must be a multiple of the {count} processes")
    return batch_size // count


def load_packed(config: DataConfig, model_vocab_size: int) -> PackedCorpus:
    """Opens and checks the datasets that a configuration names; seconds, whatever their size.

    Without `eval_data` the last 5 % of the documents are held out to evaluate on: Megatron's split 95,5.
    The vocabulary is `vocab_size`, or else that of PREFIX.tokenizer.json, up to a multiple of 128, or else
    model_vocab_size.

    Raises:
      ValueError: broken files, ids past the vocabulary, different tokenizers, or no data to evaluate on.
    """
    prefixes, weights = parse_blend(config.data)
    if config.eval_data is None and len(prefixes) > 1:
        raise ValueError("--data names several datasets: name one to evaluate on, as --eval-data PREFIX")
    datasets = tuple(IndexedDataset(prefix) for prefix in prefixes)
    held_out = [] if config.eval_data is None else [IndexedDataset(config.eval_data)]
    vocab_size = _vocabulary([d.prefix for d in (*datasets, *held_out)], config.vocab_size, model_vocab_size)
    for dataset in (*datasets, *held_out):
        dataset.check_ids(vocab_size)
    documents, validation = tuple(range(len(d)) for d in datasets), held_out[0].tokens if held_out else None
    if validation is None:
        documents, validation = _split(datasets[0])
    return PackedCorpus(
        datasets, documents, None if weights is None else tuple(weights), validation, vocab_size
    )


def load_validation(prefix: str, vocab_size: int, whole: bool) -> Tokens:
    """Returns what to evaluate on of a dataset: the last 5 % of its documents, or all; ids are checked.

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
    if len({path.read_bytes() for path in paths}) > 1:
        raise ValueError(
            f"the datasets are of different tokenizers: {', '.join(map(str, paths))}; tokenize them alike"
        )
    if not paths:
        return model_vocab_size
    return -(-tokenizer_vocab_size(paths[0]) // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE


def _split(dataset: IndexedDataset) -> tuple[tuple[range, ...], Tokens]:
    """Returns the documents to train on, and the tokens of the rest."""
    cut = round(_TRAIN_SHARE * len(dataset))
    start = (
        int(dataset.offsets[cut]) // dataset.tokens.itemsize if cut < len(dataset) else len(dataset.tokens)
    )
    return (range(cut),), dataset.tokens[start:]


def _number(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None
