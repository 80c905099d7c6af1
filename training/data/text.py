"""What a run trains on, cut into batches that are a pure function of the seed and the step.

Text is read as bytes here: token ids are bytes, and 256 ends a document; `megatron` reads tokenized datasets.
A batch is int32 [batch, seq_len + 1]: inputs are all but the last token of each row, targets all but the
first.
"""

import dataclasses
import pathlib
import sysconfig
import zlib
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np
from jaxtyping import Int32, Integer, UInt16

from training.config import DataConfig
from training.data.indexed_dataset import check_tokens
from training.data.megatron import PackedCorpus, is_packed, load_packed, load_validation, rows_of_a_shard

END_OF_DOCUMENT = 256
VOCAB_SIZE = 257
_VALIDATION_SHARE = 20  # one file, or one byte, in 20
_COMPRESSED, _DATASET = {".gz", ".parquet"}, (".bin", ".idx")
_NOT_SOURCE = {"site-packages", "dist-packages", "__pycache__", "test", "tests"}

Tokens = UInt16[np.ndarray, "n"]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Text as bytes, split into training and validation.

    Attributes:
      train, validation: token ids.
      source: where the text came from.
      vocab_size: of the model.
    """

    train: Tokens
    validation: Tokens
    source: str
    vocab_size: int = VOCAB_SIZE

    @property
    def train_tokens(self) -> int:
        """How many tokens there are to train on."""
        return len(self.train)

    def batches(
        self, config: DataConfig, seed: int, steps: int, start: int = 0, shard: tuple[int, int] = (0, 1)
    ) -> grain.DatasetIterator:
        """Returns the batches of a run, as `PackedCorpus.batches` does; see `batches`."""
        return batches(self.train, config, seed, start, shard)

    def batch_indices(self, config: DataConfig, seed: int, steps: int, step: int) -> dict[str, list[int]]:
        """Returns which windows of seq_len tokens make up the batch of a step, counted from 0.

        Window i is of the tokens i * seq_len to (i + 1) * seq_len of `train`.
        """
        windows = np.arange(len(_Windows(self.train, config.seq_len, "training")))
        return {"windows": np.asarray(_in_order(windows, seed, config.batch_size)[step]).tolist()}

    @property
    def facts(self) -> dict[str, int | str]:
        """What identifies the data: source, sizes and a checksum."""
        checksum = zlib.crc32(self.validation.tobytes(), zlib.crc32(self.train.tobytes()))
        sizes = {"train_tokens": len(self.train), "validation_tokens": len(self.validation)}
        return {"source": self.source, **sizes, "crc32": f"{checksum:08x}"}

    def unigram_entropy(self) -> float:
        """Returns the entropy of the validation tokens in nats: the loss of a model without context."""
        frequency = np.bincount(self.validation, minlength=VOCAB_SIZE) / len(self.validation)
        return float(-np.sum(frequency[frequency > 0] * np.log(frequency[frequency > 0])))


def load_corpus(path: pathlib.Path | None) -> Corpus:
    """Returns the text of a file, of all files of a folder, or, for None, of Python's standard library.

    Folders are split into training and validation by file, by a checksum of the file's name, so that
    adding files moves none. A single file, or a folder of so few that one part would be empty, is split
    near its end. Hidden files are left out.

    Raises:
      ValueError: nothing to read there, or something else than text.
    """
    if path is None:
        root = pathlib.Path(sysconfig.get_paths()["stdlib"])
        files = [f for f in root.rglob("*.py") if not _NOT_SOURCE & set(f.relative_to(root).parts)]
        return _split_by_file(root, files, "the source of Python's standard library")
    if path.is_file():
        _check_text([path])
        return _split_by_position(_join([path.read_bytes()]), str(path))
    if not path.is_dir():
        raise ValueError(f"--data {path}: no such file, folder, or dataset {path}.idx")
    files = [f for f in path.rglob("*") if f.is_file() and not _hidden(f.relative_to(path))]
    _check_text(files)
    return _split_by_file(path, files, str(path))


def load_data(config: DataConfig, model_vocab_size: int) -> Corpus | PackedCorpus:
    """Returns what a configuration trains and evaluates on: text, or datasets whose prefixes it names.

    Args:
      config: `data` and `eval_data` are both text or both tokenized.
      model_vocab_size: of the model as it is published, for datasets that come without a tokenizer.
    Raises:
      ValueError: it cannot be read, or token ids are past the vocabulary.
    """
    if is_packed(config.data):
        return load_packed(config, model_vocab_size)
    corpus = load_corpus(pathlib.Path(config.data[0]) if config.data else None)
    if config.eval_data is not None:
        if is_packed([config.eval_data]):
            raise ValueError(
                f"--eval-data {config.eval_data} is tokenized and --data is text; tokenize both or neither"
            )
        held_out = load_corpus(pathlib.Path(config.eval_data))
        whole = (np.concatenate([c.train, c.validation]) for c in (corpus, held_out))
        corpus = Corpus(*whole, source=corpus.source)
    if config.vocab_size is not None and config.vocab_size < VOCAB_SIZE:
        raise ValueError(
            f"text is read as {VOCAB_SIZE} ids, which --vocab-size {config.vocab_size} does not hold"
        )
    return dataclasses.replace(corpus, vocab_size=config.vocab_size or VOCAB_SIZE)


def load_held_out(path: str, vocab_size: int, whole: bool) -> Integer[np.ndarray, " n"]:
    """Returns the tokens to evaluate on of a text or dataset: its validation part, or all of it.

    Raises:
      ValueError: it cannot be read, or token ids are past the vocabulary.
    """
    if is_packed([path]):
        return load_validation(path, vocab_size, whole)
    corpus = load_corpus(pathlib.Path(path))
    return np.concatenate([corpus.train, corpus.validation]) if whole else corpus.validation


def batches(
    tokens: Tokens, config: DataConfig, seed: int, start: int = 0, shard: tuple[int, int] = (0, 1)
) -> grain.DatasetIterator:
    """Returns the endless batches of a run from step `start` on, read ahead by grain.

    Each epoch visits every window of seq_len tokens once, in an order drawn from `seed`. The iterator's
    position is one integer, the step: `get_state()["next_index"]`. `shard` (i, n) gives the i-th of n equal
    parts of each batch.

    Raises:
      ValueError: fewer tokens than one sequence needs, or batch_size is no multiple of n.
    """
    index, count = shard
    rows_of_a_shard(config.batch_size, count)
    windows = _Windows(tokens, config.seq_len, "training")
    dataset = _in_order(windows, seed, config.batch_size)
    if count > 1:
        dataset = dataset.map(lambda batch: np.split(batch, count)[index])
    iterator = iter(dataset.to_iter_dataset())
    iterator.set_state({"next_index": start})
    return iterator


def _in_order(source: Any, seed: int, batch_size: int) -> grain.MapDataset:
    # For ever, as good as: of an endless dataset, batches of one overflow grain's count.
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

    With n_sequences, yields exactly the first n_sequences sequences instead.

    Raises:
      ValueError: fewer tokens than one sequence, or n_sequences, need, or an id of vocab_size or greater.
    """
    windows = _Windows(tokens, config.seq_len, "validation")
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


class _Windows:
    """The sequences of a token stream: [i * seq_len, (i + 1) * seq_len], one token shared with the next."""

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


def _split_by_file(root: pathlib.Path, files: list[pathlib.Path], source: str) -> Corpus:
    if not files:
        raise ValueError(f"--data {root}: no files to read")
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for file in sorted(files):
        checksum = zlib.crc32(file.relative_to(root).as_posix().encode())
        parts[checksum < 2**32 // _VALIDATION_SHARE].append(file.read_bytes())
    train, validation = map(_join, parts)
    if not len(train) or not len(validation):
        return _split_by_position(np.concatenate([train, validation]), source)
    return Corpus(train, validation, source)


def _split_by_position(tokens: Tokens, source: str) -> Corpus:
    cut = len(tokens) - len(tokens) // _VALIDATION_SHARE
    return Corpus(tokens[:cut], tokens[cut:], source)


def _join(documents: list[bytes]) -> Tokens:
    end = np.array([END_OF_DOCUMENT], np.uint16)
    parts = [part for d in documents if d for part in (np.frombuffer(d, np.uint8).astype(np.uint16), end)]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint16)


def _check_text(files: list[pathlib.Path]) -> None:
    """Raises ValueError if one of the files is compressed, or one of a tokenized dataset's two."""
    for path in files:
        if path.suffix in _COMPRESSED:
            raise ValueError(
                f"{path} is compressed, not text; tokenize it first: python -m training.tokenize --help"
            )
        if path.suffix in _DATASET and all(path.with_suffix(s).is_file() for s in _DATASET):
            raise ValueError(f"{path} holds tokens, not text; name the dataset as {path.with_suffix('')}")


def _hidden(path: pathlib.Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
