"""Write datasets with megatron-core and store them, and the order in which its GPTDataset reads them.

Run with Python 3.11, torch 2.13.0+cpu, megatron-core 0.16.1, numpy 2.4.6:

    python tests/golden/make_megatron.py

Writes megatron.npz next to this file:

    bin/NAME, idx/NAME   uint8, the two files of the datasets a (uint16), b (int32) and long (int32),
                         as IndexedDatasetBuilder writes them
    cases                [] JSON list of the cases: dataset or blend, split, seed, sequence length, samples
    tokens/I             [samples, sequence length + 1] int32, tokens and the last label of each sample of case I
    order/I              for blends, [samples, 2] int64: dataset and sample
    documents/I, samples/I   of single datasets: document_index int32, shuffle_index uint32
    blend/weights, blend/order   weights, and (dataset, sample) by helpers.build_blending_indices for 3,000 samples
    versions             [n] versions this file was made with
"""

import importlib.metadata
import json
import pathlib
import platform
import tempfile
import types

import numpy as np
import torch
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.utils import normalize

# name: (dtype, vocabulary, number of documents, longest document)
DATASETS = {"a": (np.uint16, 1000, 60, 40), "b": (np.int32, 70_000, 45, 60), "long": (np.int32, 300, 5, 900)}

SINGLE = [
    # data, split, seed, seq_len, num_samples
    ("a", "1", 0, 16, 10),  # less than an epoch
    ("a", "1", 1234, 16, None),  # one epoch
    ("a", "1", 7, 16, 150),  # several epochs
    ("a", "1", 7, 16, 160),  # each of these two ends its last epoch at another place
    ("a", "1", 7, 16, 230),
    ("a", "95,5,0", 3, 16, 100),  # the first documents alone
    ("a", "1", 11, 1, 1300),
    ("b", "1", 2**32 - 1, 32, 90),
    ("b", "1", 5, 7, 400),
    ("b", "90,10", 5, 128, 40),
    ("long", "1", 0, 64, 80),  # documents longer than samples
    ("long", "1", 9, 5000, 3),  # samples longer than epochs
]
BLENDS = [
    # data, weights, split, seed, seq_len, num_samples
    (["a", "b"], [0.3, 0.7], "1", 0, 16, 200),
    (["a", "b", "long"], [30.0, 20.0, 50.0], "80,20", 21, 16, 333),
    (["a", "b"], None, "1", 4, 16, 100),
]
WEIGHTS = [0.11, 0.37, 0.22, 0.3, 1e-3]


def write(folder):
    rng = np.random.default_rng(0)
    for name, (dtype, vocabulary, documents, longest) in DATASETS.items():
        builder = IndexedDatasetBuilder(f"{folder}/{name}.bin", dtype=dtype)
        for i in range(documents):
            n = 0 if i == 3 else int(rng.integers(1, longest + 1))
            builder.add_document(torch.from_numpy(rng.integers(0, vocabulary, n)), [n])
        builder.finalize(f"{folder}/{name}.idx")


def build(folder, names, weights, split, seed, seq_len, num_samples):
    tokenizer = types.SimpleNamespace(vocab_size=None, eod=0, pad=-1, unique_identifiers={})
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_len,
        blend=([f"{folder}/{name}" for name in names], weights),
        split=split,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        path_to_cache=f"{folder}/cache",
    )
    sizes = [num_samples, None if weights is None else 1, None if weights is None else 1]
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]


def tokens(dataset, n):
    rows = []
    for i in range(n):
        item = dataset[i]
        assert torch.equal(item["tokens"][1:], item["labels"][:-1])
        rows.append(np.append(item["tokens"].numpy(), item["labels"][-1].item()))
    return np.array(rows, np.int32)


def main():
    # Megatron asks for its rank where it writes its cache.
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    out, cases = {}, []
    with tempfile.TemporaryDirectory() as folder:
        write(folder)
        for name in DATASETS:
            for suffix in ("bin", "idx"):
                out[f"{suffix}/{name}"] = np.fromfile(f"{folder}/{name}.{suffix}", np.uint8)
        for name, split, seed, seq_len, n in SINGLE:
            dataset = build(folder, [name], None, split, seed, seq_len, n)
            i = len(cases)
            out[f"tokens/{i}"] = tokens(dataset, len(dataset))
            out[f"documents/{i}"] = np.asarray(dataset.document_index)
            out[f"samples/{i}"] = np.asarray(dataset.shuffle_index)
            cases.append({"data": [name], "weights": None, "split": split, "seed": seed, "seq_len": seq_len, "n": n})
        for names, weights, split, seed, seq_len, n in BLENDS:
            dataset = build(folder, names, weights, split, seed, seq_len, n)
            i = len(cases)
            out[f"tokens/{i}"] = tokens(dataset, len(dataset))
            out[f"order/{i}"] = np.stack([dataset.dataset_index, dataset.dataset_sample_index], 1).astype(np.int64)
            cases.append(
                {"data": names, "weights": weights, "split": split, "seed": seed, "seq_len": seq_len, "n": n}
            )
    size = 3000
    chosen, sample = np.zeros(size, np.int16), np.zeros(size, np.int64)
    helpers.build_blending_indices(chosen, sample, np.array(normalize(WEIGHTS)), len(WEIGHTS), size, False)
    out["blend/weights"], out["blend/order"] = np.array(WEIGHTS), np.stack([chosen, sample], 1).astype(np.int64)
    out["cases"] = np.array(json.dumps(cases))
    packages = ("torch", "megatron-core", "numpy")
    versions = [f"{p} {importlib.metadata.version(p)}" for p in packages]
    out["versions"] = np.array([f"python {platform.python_version()}", *versions])
    path = pathlib.Path(__file__).with_name("megatron.npz")
    np.savez_compressed(path, **out)
    print(path.name, len(out), "arrays", path.stat().st_size, "bytes", *versions)
    for i, case in enumerate(cases):
        print(i, case, out[f"tokens/{i}"].shape)


if __name__ == "__main__":
    main()
