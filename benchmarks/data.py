"""Speed and memory of tokenizing and of reading tokenized data on this machine's processor.

    python -m benchmarks.data CORPUS [--documents 45000000] [--repeats 3]

CORPUS is a folder in C4's layout. This measures

- `training.tokenize` from files to dataset, beside the package tokenizers alone (`encode_batch` on the same
  texts in memory, with a thread for each core);
- the reader's tokens/s through grain;
- in a separate process, the time to the first batch and the memory on a dataset of --documents simulated
  documents, whose .bin is a sparse file.

Prints tables, and JSON last.
"""

import argparse
import contextlib
import ctypes
import json
import os
import pathlib
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np

from mxjax.tables import table
from training.config import DataConfig
from training.data.indexed_dataset import IndexedDataset, write_index
from training.data.megatron import load_megatron
from training.data.tokenizer import load_tokenizer
from training.startup import cores
from training.tokenize.documents import Document, Documents, find_files
from training.tokenize.train_tokenizer import train_tokenizer

VOCABULARY = 32_000
# A lognormal with about C4's mean: 156 G tokens in 365 M documents (arXiv 1910.10683, 2104.08758).
MEAN_LENGTH, SPREAD = 430, 1.0
NEEDED = 4 * 14_000  # tokens/s at which four H200s train Llama 3.1 8B, about


def encode_alone(tokenizer: pathlib.Path, texts: list[str]) -> int:
    """Encodes the texts by tokenizers alone, 1,000 at a time; returns the number of tokens."""
    encode = load_tokenizer(tokenizer).encode_batch
    return sum(
        len(encoding)
        for i in range(0, len(texts), 1000)
        for encoding in encode(texts[i : i + 1000], add_special_tokens=False)
    )


def run_command(files: list[str], prefix: pathlib.Path, tokenizer: pathlib.Path) -> dict[str, Any]:
    """Runs `python -m training.tokenize` and returns its record."""
    flags = ["--input", *files, "--output", str(prefix), "--tokenizer", str(tokenizer)]
    subprocess.run([sys.executable, "-m", "training.tokenize", *flags], check=True)
    with contextlib.suppress(ChildProcessError):
        while True:  # its orphans are ours now, and their time counts after waiting
            os.waitpid(-1, 0)
    return json.loads(prefix.with_suffix(".json").read_text())


def adopt_orphans() -> None:
    """Makes this the parent of orphaned processes (Linux), so that their time can be counted."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def clocks() -> np.ndarray:
    """Returns the time, and the processor time of this process and of its finished children."""
    cpu = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return np.array([time.perf_counter(), sum(usage.ru_utime + usage.ru_stime for usage in cpu)])


def link_copies(folder: pathlib.Path, files: list[str], number: int) -> list[str]:
    """Links to each file several times, for a run whose start matters less."""
    links = [folder / f"{i}-{pathlib.Path(file).name}" for i in range(number) for file in files]
    for link, file in zip(links, files * number, strict=True):
        link.symlink_to(pathlib.Path(file).absolute())
    return list(map(str, links))


def time_tokenizing(folder: pathlib.Path, files: list[str], repeats: int, number: int) -> dict[str, Any]:
    """Times tokenizers alone and the command, in turns.

    Returns tokens a second, and tokens a second of processor time, which other load changes less.
    """
    start = time.perf_counter()
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(train_tokenizer(files, "text", VOCABULARY, 2_000_000_000))
    training = time.perf_counter() - start
    texts = [item.text for path in files for item in Documents(path) if isinstance(item, Document)]
    many, tokens = link_copies(folder, files, number), 0
    several = f"mxjax, {number} times the text"
    seconds: dict[str, list[np.ndarray]] = {"tokenizers": [], "mxjax": [], several: []}
    for i in range(repeats):
        before = clocks()
        tokens = encode_alone(tokenizer, texts)
        seconds["tokenizers"].append(clocks() - before)
        for name, inputs, times, prefix in (("mxjax", files, 1, "d"), (several, many, number, "many")):
            before = clocks()
            record = run_command(inputs, folder / f"{prefix}{i}", tokenizer)
            seconds[name].append((clocks() - before) / times)
            if record["tokens"] != tokens * times:
                raise RuntimeError(f"{record['tokens']} tokens written, the library makes {tokens * times}")
    return {
        "tokens": tokens,
        "characters": sum(map(len, texts)),
        "training_s": training,
        "tokens_per_s": {name: [tokens / s[0] for s in found] for name, found in seconds.items()},
        "tokens_per_cpu_s": {name: [tokens / s[1] for s in found] for name, found in seconds.items()},
    }


def time_reading(prefix: str, seq_len: int, repeats: int) -> list[float]:
    """Times batches of 32 sequences, each repeat over five seconds after the first; returns tokens/s."""
    config, speeds = DataConfig((prefix,), batch_size=32, seq_len=seq_len), []
    corpus = load_megatron(config, VOCABULARY)
    for seed in range(repeats):
        stream = corpus.batches(config, seed, steps=100_000)
        next(stream)
        start, batches = time.perf_counter(), 0
        while time.perf_counter() - start < 5.0:
            batches += next(stream)[:, 1:].size > 0
        speeds.append(batches * 32 * seq_len / (time.perf_counter() - start))
    return speeds


def simulate(prefix: pathlib.Path, documents: int) -> int:
    """Writes an .idx of simulated documents and a sparse .bin of zeros; returns the number of tokens."""
    rng = np.random.default_rng(0)
    mean = np.log(MEAN_LENGTH) - SPREAD**2 / 2
    lengths = np.maximum(rng.lognormal(mean, SPREAD, documents), 1).astype(np.int32)
    tokens = int(lengths.sum(dtype=np.int64))
    with prefix.with_suffix(".bin").open("wb") as file:
        file.truncate(tokens * 2)
    write_index(prefix.with_suffix(".idx"), np.dtype(np.uint16), lengths)
    return tokens


def first_batch(prefix: str, seq_len: int, steps: int) -> dict[str, float]:
    """Times each stage up to the first batch of this process; returns seconds, and memory in GB."""
    times, start = {}, time.perf_counter()

    def lap(name: str) -> None:
        times[name] = time.perf_counter() - start - sum(times.values())

    config = DataConfig((prefix,), batch_size=32, seq_len=seq_len)
    before = memory("RssAnon")
    IndexedDataset(prefix)
    lap("open_check_s")
    corpus = load_megatron(config, VOCABULARY)
    lap("load_s")
    _ = corpus.facts
    lap("facts_s")
    stream = corpus.batches(config, 0, steps)
    lap("order_s")
    next(stream)
    lap("first_batch_s")
    lap_free = sum(times.values()) - times["open_check_s"]  # load_s opens and checks again
    return times | {
        "total_s": lap_free,
        "anonymous_gb": memory("RssAnon") - before,
        "peak_resident_gb": memory("VmHWM"),
        "page_cache_gb": memory("RssFile"),
    }


def memory(name: str) -> float:
    """Reads a line of /proc/self/status, in GB."""
    status = pathlib.Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(name)) * 1024 / 1e9


def first_batch_in_process(*arguments: Any) -> dict[str, float]:
    """Returns the result of `first_batch` in a new process."""
    code = f"import json, benchmarks.data as d; print(json.dumps(d.first_batch{arguments!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def processor() -> str:
    """Returns the processor's name, from Linux if it is there."""
    path = pathlib.Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def tables(results: dict[str, Any]) -> str:
    """Returns the results as tables."""
    reading = results["reading_tokens_per_s"]
    speeds = {
        f"tokenize: {name}{' (CPU seconds)' if 'cpu' in kind else ''}": found
        for kind in ("tokens_per_s", "tokens_per_cpu_s")
        for name, found in results["tokenizing"][kind].items()
    }
    speeds |= {f"read, {length} tokens a sequence": found for length, found in reading.items()}
    rows = [
        [name, *(f"{n:,.0f}" for n in (statistics.median(found), min(found), max(found)))]
        for name, found in speeds.items()
    ]
    slowest = min(min(found) for found in reading.values())
    rows.append([f"slowest read / needs of 4 GPUs ({NEEDED:,})", f"{slowest / NEEDED:,.0f}", "", ""])
    simulated = f"{results['documents']:,} documents, {results['simulated_tokens']:,} tokens"
    first = [[name, f"{value:.2f}"] for name, value in results["first_batch"].items()]
    return "\n\n".join(
        (
            table("tokens/s | median | lowest | highest", rows, padded=True),
            table(f"first batch, {simulated} | s or GB", first, padded=True),
        )
    )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="Speed of tokenizing and of reading tokenized data.")
    parser.add_argument("corpus", type=pathlib.Path)
    parser.add_argument("--documents", type=int, default=45_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--copies", type=int, default=4, help="copies of the text in a second tokenizing run")
    arguments = parser.parse_args()
    adopt_orphans()
    files = find_files([str(arguments.corpus / "c4-train.*.json.gz")])
    results: dict[str, Any] = {"cores": cores(), "processor": processor(), "load": os.getloadavg()}
    results |= {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "documents": arguments.documents,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        results["tokenizing"] = time_tokenizing(folder, files, arguments.repeats, arguments.copies)
        results["reading_tokens_per_s"] = {
            length: time_reading(str(folder / "d0"), length, arguments.repeats)
            for length in (512, 2048, 8192)
        }
        results["simulated_tokens"] = simulate(folder / "simulated", arguments.documents)
        results["first_batch"] = first_batch_in_process(str(folder / "simulated"), 8192, 10_000)
    print(tables(results))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
