"""The sequences of Megatron indexed datasets, by index, in megatron-core's order."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from training.data.indexed_dataset import IndexedDataset, check_tokens
from training.data.megatron_order import BlendOrder, GPTOrder


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
