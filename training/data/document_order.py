"""The order of megatron-core's GPTDataset and BlendedDataset: pure functions of (seed, index).

Documents are shuffled and read as one stream of tokens. The stream is split into samples of seq_len + 1
tokens; neighbours share one token. Then the samples are shuffled.

Source: megatron-core 0.16, `megatron/core/datasets/{gpt_dataset,blended_dataset}.py` and `helpers.cpp`.
"""

import dataclasses
import math
import threading
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32, Integer

from training.data.indexed_dataset import IndexedDataset, check_tokens

_MARK = 64  # every so many documents the position in the stream is stored
_FINAL_EPOCH_SHARE = 0.80  # a last epoch that is needed by less than this is shuffled separately
_SURPLUS = 0.005  # extra samples of a blend's datasets: mid_level_dataset_surplus
_BLOCK = 2**16  # samples of a blend that are assigned together
_CHUNK = _MARK * 2**16


class GPTOrder:
    """The tokens of each sample of one dataset.

    Memory holds the shuffled documents (4 bytes a document and epoch), the shuffled samples (4 bytes a
    sample) and the position of every 64th document, whatever the number of tokens.

    Attributes:
      epochs: how often every document is read.
      separate_final_epoch: whether the last epoch is shuffled separately.
    """

    def __init__(
        self,
        lengths: Int32[np.ndarray, " documents"],
        seq_len: int,
        seed: int,
        num_samples: int | None = None,
        documents: range | None = None,
    ):
        """Shuffles; takes about 0.1 s for each million documents.

        Args:
          lengths: tokens of each document (in Megatron's terms, of each sequence).
          seq_len: tokens of a sample less one.
          seed: from 0 to 2**32 - 1.
          num_samples: samples needed, which decides the number of epochs; None is one epoch.
          documents: the documents to read, consecutive; None is all.
        Raises:
          ValueError: there are too few tokens for a sample, or the seed is out of range.
        """
        documents = range(len(lengths)) if documents is None else documents
        per_epoch = int(lengths[documents.start : documents.stop].sum(dtype=np.int64))
        wanted = 1 if num_samples is None else num_samples * seq_len + 1
        self.epochs = max(1, -(-wanted // per_epoch)) if per_epoch else 0
        size = (self.epochs * per_epoch - 1) // seq_len
        if size < 1:
            raise ValueError(
                f"a sample needs --seq-len + 1 = {seq_len + 1} tokens and the {len(documents):,} documents "
                f"to train on have {per_epoch:,}; shorten --seq-len or give more data"
            )
        before = ((self.epochs - 1) * per_epoch - 1) // seq_len  # samples without the last epoch
        threshold = int(_FINAL_EPOCH_SHARE * ((per_epoch - 1) // seq_len))
        self.separate_final_epoch = (
            self.epochs > 1 and num_samples is not None and num_samples - before < threshold
        )
        random = np.random.RandomState(seed)  # its stream is part of the order
        first = self.epochs - 1 if self.separate_final_epoch else self.epochs
        self._documents = np.tile(np.arange(documents.start, documents.stop, dtype=np.int32), self.epochs)
        _shuffle_parts(random, self._documents, first * len(documents))
        self._samples = np.arange(size, dtype=np.uint32 if size < 2**32 - 2 else np.int64)
        _shuffle_parts(random, self._samples, before if self.separate_final_epoch else size)
        self._lengths, self.seq_len = lengths, seq_len
        self._marks = _marks(lengths, self._documents)

    def __len__(self) -> int:
        """The number of samples, at least num_samples."""
        return len(self._samples)

    def pieces(self, index: int) -> tuple[Integer[np.ndarray, " pieces"], int, int]:
        """Returns the documents of sample `index`, and where it begins and ends in them.

        Returns:
          documents: their numbers, in order; some may be empty.
          start: tokens of the first document before the sample.
          stop: tokens of the last document up to the sample's end.
        """
        begin = int(self._samples[index]) * self.seq_len
        last = begin + self.seq_len  # position of the sample's last token
        i, j = self._marks.searchsorted((begin, last), "right") - 1
        documents = self._documents[i * _MARK : (j + 1) * _MARK]
        ends = self._lengths[documents].cumsum(dtype=np.int64) + self._marks[i]
        a, b = ends.searchsorted((begin, last), "right")
        starts = ends[[a, b]] - self._lengths[documents[[a, b]]]
        return documents[a : b + 1], begin - int(starts[0]), last + 1 - int(starts[1])


class BlendOrder:
    """The dataset of each sample of a blend, and the sample's index in it.

    Sample i comes from the dataset whose count of samples so far falls furthest behind its weight times
    max(i, 1); the first one wins a tie. Samples are assigned in blocks when they are first needed, in order:
    one or two seconds a million samples.
    """

    def __init__(self, weights: Sequence[float], size: int):
        """Weights need not sum to 1."""
        self.weights, self._size = _normalized(weights), size
        self._starts = [[0] * len(weights)]  # counts before each block
        self._blocks: list[np.ndarray] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[int, int]:
        """Returns (dataset, sample) of sample `index`."""
        block, within = divmod(index, _BLOCK)
        with self._lock:  # grain reads from several threads
            while len(self._blocks) <= block:
                self._decide()
        chosen = self._blocks[block]
        dataset = int(chosen[within])
        return dataset, self._starts[block][dataset] + int(np.count_nonzero(chosen[:within] == dataset))

    def check(self, sizes: Sequence[int], names: Sequence[str]) -> None:
        """Raises ValueError if a dataset has fewer samples than the blend takes from it."""
        # No count exceeds its share by a whole sample, so counting is rarely necessary.
        if all(math.floor(w * self._size) + 1 <= n for w, n in zip(self.weights, sizes, strict=True)):
            return
        counts = np.zeros(len(sizes), np.int64)
        for start in range(0, self._size, _BLOCK):
            self[start]
            chosen = self._blocks[start // _BLOCK][: self._size - start]
            counts += np.bincount(chosen, minlength=len(sizes))
        for name, count, size in zip(names, counts, sizes, strict=True):
            if count > size:
                raise ValueError(f"the blend asks for {count:,} samples of {name}, which gives {size:,}")

    def _decide(self) -> None:
        begin, counts = len(self._blocks) * _BLOCK, list(self._starts[-1])
        chosen = []
        for i in range(begin, begin + _BLOCK):  # each depends on the last, so no array operation does this
            x = float(i or 1)
            behind = [weight * x - count for weight, count in zip(self.weights, counts)]  # noqa: B905
            dataset = behind.index(max(behind))
            chosen.append(dataset)
            counts[dataset] += 1
        self._starts.append(counts)
        self._blocks.append(np.array(chosen, np.int16))


def blend_samples(weights: Sequence[float], size: int) -> tuple[list[int], int]:
    """Returns the number of samples to build each dataset of a blend for, and the size of the blend.

    The blend's size is the sum of the datasets' shares of `size`, each rounded up; each dataset is built for
    0.5 % more.
    """
    shares = [math.ceil(size * w) for w in _normalized(weights)]
    return [math.ceil(share * (1 + _SURPLUS)) for share in shares], sum(shares)


def _normalized(weights: Sequence[float]) -> list[float]:
    values = np.array(weights, np.float64)
    return (values / np.sum(values)).tolist()


def _shuffle_parts(random: np.random.RandomState, values: Integer[np.ndarray, " n"], cut: int) -> None:
    """Shuffles values[:cut] and values[cut:], in place."""
    random.shuffle(values[:cut])
    if cut < len(values):
        random.shuffle(values[cut:])


def _marks(
    lengths: Int32[np.ndarray, " n"], documents: Int32[np.ndarray, " m"]
) -> Integer[np.ndarray, " marks"]:
    """Returns the number of tokens before every 64th of `documents`."""
    sums = [np.zeros(1, np.int64)]
    for start in range(0, len(documents), _CHUNK):
        chunk = lengths[documents[start : start + _CHUNK]]
        sums.append(np.add.reduceat(chunk, np.arange(0, len(chunk), _MARK), dtype=np.int64))
    return np.concatenate(sums)[:-1].cumsum()


class GPTDataset:
    """The samples of one dataset in megatron-core's order: int32 [seq_len + 1] each.

    Pickles as its arguments: grain's worker processes map the same files and compute the order again.
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
        """See `GPTOrder`; reading a token id of vocab_size or greater raises ValueError."""
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
        """Returns the dataset's prefix and the documents of a sample."""
        return self.dataset.prefix, self.order.pieces(index)[0].tolist()


class Blend:
    """The samples of several datasets, in the order of megatron-core's BlendedDataset."""

    def __init__(self, datasets: Sequence[GPTDataset], weights: Sequence[float], size: int):
        """Raises ValueError if a dataset has fewer samples than its weight needs."""
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
        """Returns the prefix of a sample's dataset, and the sample's documents."""
        dataset, sample = self.order[index]
        return self.datasets[dataset].source(sample)


@dataclasses.dataclass(frozen=True)
class Rows:
    """The samples of `steps` batches of `batch_size` that process `shard` of `count` reads."""

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
