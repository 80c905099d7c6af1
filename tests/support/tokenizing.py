"""A small corpus in C4's layout, and tokenizing without other processes."""

import contextlib
import gzip
import json

import numpy as np

from training.data.tokenizer import load_tokenizer
from training.tokenize import workers
from training.tokenize.plan import TokenizeConfig


def write_files(folder, n_files, n_documents, words=8):
    """Writes C4-like files; returns the texts in order."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    texts = []
    for f in range(n_files):
        mine = [
            " ".join(f"word{n} über," for n in rng.integers(0, 50, words)) + f" {f} {d}"
            for d in range(n_documents)
        ]
        lines = "".join(json.dumps({"text": t, "url": "u"}) + "\n" for t in mine)
        (folder / f"c4-train.{f:05d}.json.gz").write_bytes(gzip.compress(lines.encode()))
        texts += mine
    return texts


def config(folder, prefix, tokenizer=None, **options):
    return TokenizeConfig((str(folder / "*"),), str(prefix), tokenizer, **options)


def make_here(monkeypatch):
    """Makes the parts of a dataset in this process: starting others takes seconds each."""

    def make(job, files, numbers, processes, show):
        monkeypatch.setattr(
            workers, "_process", (job, _State(), load_tokenizer(job.tokenizer)), raising=False
        )
        for number in numbers:
            workers._make(number, files[number])
            show(0, 0)
            yield workers._read(job.folder, number, files[number])

    monkeypatch.setattr(workers, "make", make)


class _State(list):
    def __init__(self):
        super().__init__([0, 0, 0])

    def get_lock(self):
        return contextlib.nullcontext()
