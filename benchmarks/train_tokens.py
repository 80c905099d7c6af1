"""The text that `benchmarks.train_speed` trains on, as one file of tokens for all its processes."""

import os
import pathlib

import numpy as np

from benchmarks.train_job import Job, number_of_steps
from models.configs import get_config
from training.config import DataConfig
from training.data.load import load_data


def write_tokens(path: pathlib.Path, job: Job, data: str | None) -> dict[str, int | str]:
    """Writes the first batches of a training run as int32 [steps, batch, seq + 1].

    Returns the identity of the data: the name of its source, its sizes, and a checksum.

    Args:
      path: the .npy file to write.
      job: any of the jobs, which agree in model, batch, sequence length and number of steps.
      data: a text file, a folder or a dataset's prefix, as train.py's --data; None reads the source of
        Python's standard library as bytes.

    Raises:
      ValueError: the data cannot be read, or holds ids that the model's vocabulary does not.
    """
    size = get_config(job.model).vocab_size
    config = DataConfig(
        () if data is None else (data,), vocab_size=size, batch_size=job.batch, seq_len=job.seq
    )
    corpus, steps = load_data(config, size), number_of_steps(job)
    batches = corpus.batches(config, 0, steps)
    np.save(path, np.stack([next(batches) for _ in range(steps)]).astype(np.int32))
    return corpus.facts | {"source": os.path.basename(corpus.source)}
