"""Every parser of files that others wrote, on damaged and generated ones: it reads or refuses them.

Refusing is a ValueError raised here, whose message names the file. Another exception, an input that takes
seconds, and gigabytes of memory are failures.
"""

import gzip
import json
import linecache
import pathlib
import resource
import signal
import tempfile
import time
import traceback

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from support import oracles
from support.llamas import GOLDEN, NAMES, golden_raw

import mxjax
from models.huggingface.config import read_config
from models.huggingface.folder import read_json
from models.huggingface.safetensors_files import INDEX, SINGLE, Reader
from models.huggingface.tensors import check_tensors
from training.config import Config
from training.data.indexed_dataset import IndexedDataset, IndexedWriter
from training.data.megatron import load_validation
from training.data.tokenizer import load_tokenizer, tokenizer_vocab_size
from training.run_config import FILE, from_json, read_run_config, to_json
from training.tokenize.documents import Documents
from training.tokenize.train_tokenizer import train_tokenizer

ROOT = pathlib.Path(__file__).parents[2]
SECONDS, MEMORY = 5, 2 * 2**30
INPUTS, BATCH = 10_000, 20

# Numbers at the ends of types, and what else tends to be forgotten.
NUMBERS = st.sampled_from([0, -1, 1, 2**31 - 1, 2**31, 2**63 - 1, 2**64, 10**400, 0.5, 1e308, float("nan")])
LEAVES = NUMBERS | st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    LEAVES,
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3),
    max_leaves=5,
)
EDITS = st.lists(
    st.tuples(st.integers(0, 2**31), st.integers(0, 9), st.binary(max_size=9)), min_size=1, max_size=2
)


def edited(data: bytes, edits) -> bytes:
    """Returns the bytes with pieces replaced, each (position, bytes to remove, bytes to insert).

    Nine bytes to remove stand for all that follow.
    """
    for position, removed, inserted in edits:
        at = position % (len(data) + 1)
        data = data[:at] + inserted + (b"" if removed == 9 else data[at + removed :])
    return data


def changed(value, path, new):
    """Returns a JSON value in which a place, found by walking down the path, has a new value."""
    if not path or not isinstance(value, dict | list) or not value:
        return new
    step, *rest = path
    keys = sorted(value) if isinstance(value, dict) else range(len(value))
    key = keys[step % len(keys)]
    copy = value.copy()
    copy[key] = changed(value[key], rest, new)
    return copy


CHANGES = st.tuples(st.lists(st.integers(0, 99), max_size=4), VALUES)


@pytest.fixture(autouse=True, scope="module")
def bounded():
    """Bounds the memory that the process may map, and the time of each input."""

    def too_slow(*_):
        raise TimeoutError(f"an input takes more than {SECONDS} s")

    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, too_slow)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[0][1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before[0])
    signal.signal(signal.SIGALRM, before[1])


def reads_or_refuses(read, *names: str) -> None:
    """Runs a parser; a ValueError must be raised by a line of ours, and hold one of the names."""
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    refused, begun = None, time.monotonic()
    try:
        read()
    except ValueError as error:
        refused = error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert time.monotonic() - begun < SECONDS
    if refused is not None:
        *_, last = traceback.walk_tb(refused.__traceback__)
        file = last[0].f_code.co_filename
        line = linecache.getline(file, last[1]).strip()
        assert pathlib.Path(file).is_relative_to(ROOT), (file, refused)
        assert line.startswith("raise "), (line, refused)
        assert any(name in str(refused) for name in names), refused


def fuzz(*strategies):
    """Makes an exhaustive test of INPUTS inputs, BATCH at a time: an example costs more than a parser.

    The test takes fixtures, then a list of inputs, each a tuple of what the strategies drew.
    """
    settings = hypothesis.settings(
        max_examples=INPUTS // BATCH,
        phases=[hypothesis.Phase.generate],  # shrinking would take minutes
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    inputs = st.lists(st.tuples(*strategies), min_size=BATCH, max_size=BATCH)
    return lambda test: pytest.mark.exhaustive(settings(hypothesis.given(inputs)(test)))


@pytest.fixture(scope="module")
def folder():
    """A folder in memory, where the system has one: a hundred thousand files are written."""
    shared = pathlib.Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        yield pathlib.Path(folder)


@pytest.fixture(scope="module")
def dataset():
    """The .idx and .bin of three documents."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = pathlib.Path(folder) / "d"
        with IndexedWriter(prefix, np.uint16) as writer:
            for document in ([1, 2, 3], [], [5, 6]):
                writer.add(np.array(document))
        return {suffix: prefix.with_suffix(suffix).read_bytes() for suffix in (".idx", ".bin")}


@fuzz(EDITS, st.sampled_from([".idx", ".idx", ".bin"]))
def test_indexed_datasets(folder, dataset, inputs):
    def read():
        data = IndexedDataset(folder / "d")
        data.check_ids(100)
        data.gather([0], [len(data.tokens)])
        assert [data[i] for i in range(len(data))]
        load_validation(str(folder / "d"), 100, whole=False)

    for edits, suffix in inputs:
        for name, data in dataset.items():
            (folder / f"d{name}").write_bytes(edited(data, edits) if name == suffix else data)
        reads_or_refuses(read, str(folder / "d"))


@pytest.fixture(scope="module")
def checkpoint():
    """A small checkpoint's configuration, parsed header, header and data."""
    data = (GOLDEN / "llama3" / SINGLE).read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    return read_config(golden_raw("llama3")), json.loads(data[8:size]), data[:size], data[size:]


@fuzz(EDITS | CHANGES)
def test_safetensors(folder, checkpoint, inputs):
    config, parsed, header, data = checkpoint

    def read():
        with Reader(folder) as reader:
            check_tensors(reader.specs, config)
            for name in reader.specs:
                reader.read(name)

    for (change,) in inputs:
        text = json.dumps(changed(parsed, *change)).encode() if isinstance(change, tuple) else b""
        new = len(text).to_bytes(8, "little") + text if text else edited(header, change)
        (folder / SINGLE).write_bytes(new + data)
        reads_or_refuses(read, str(folder / SINGLE), "the tensors do not match", "config.json: ")


def write_json(path, value, change):
    """Writes a JSON value, changed inside or damaged as text."""
    if isinstance(change, tuple):
        path.write_text(json.dumps(changed(value, *change)))
    else:
        path.write_bytes(edited(json.dumps(value).encode(), change))


@fuzz(EDITS | CHANGES)
def test_the_index_of_shards(folder, inputs):
    (folder / SINGLE).unlink(missing_ok=True)
    whole = json.loads((GOLDEN / "llama3.1" / INDEX).read_text())
    for (change,) in inputs:
        write_json(folder / INDEX, whole, change)
        reads_or_refuses(lambda: Reader(folder), str(folder))


@fuzz(EDITS | CHANGES, st.sampled_from(NAMES))
def test_hugging_face_configurations(folder, inputs):
    for change, name in inputs:
        write_json(folder / "raw.json", golden_raw(name), change)
        reads_or_refuses(lambda: read_config(read_json(folder / "raw.json")), "config.json", "raw.json")


@pytest.fixture(scope="module")
def tokenizer(folder):
    (folder / "text.txt").write_text("the square of the number is the number times the number")
    return json.loads(train_tokenizer([str(folder / "text.txt")], "text", 270, 1000))


@fuzz(EDITS | CHANGES)
def test_tokenizers(folder, tokenizer, inputs):
    path = folder / "tokenizer.json"

    def vocab_size():
        assert 0 < tokenizer_vocab_size(path) <= 2**31

    for (change,) in inputs:
        write_json(path, tokenizer, change)
        reads_or_refuses(vocab_size, str(path))
        reads_or_refuses(lambda: load_tokenizer(path), str(path))


@fuzz(EDITS | CHANGES, st.sampled_from(list(mxjax.policies())))
def test_policies(inputs):
    for change, name in inputs:
        value = json.loads(mxjax.policy_to_json(mxjax.get_policy(name)))
        text = edited(json.dumps(value).encode(), [] if isinstance(change, tuple) else change)
        if isinstance(change, tuple):
            text = json.dumps(changed(value, *change)).encode()
        with oracles.types_unchecked():
            reads_or_refuses(lambda: mxjax.policy_from_json(text.decode(errors="replace")), "")  # noqa: B023


PATHS = st.sampled_from(["", "wgrad.", "wgrad.rhs.", "wgrad.rhs.block_shape=", "*.rotation="])


@fuzz(PATHS, st.text('abcdefghlmnoprstuw.*=[]{},0123456789"-', max_size=40) | VALUES.map(json.dumps))
def test_changes_of_policies(inputs):
    for path, text in inputs:
        with oracles.types_unchecked():
            reads_or_refuses(lambda: mxjax.set_fields(mxjax.Policy(), [path + text]), "")  # noqa: B023


@fuzz(EDITS | CHANGES)
def test_configurations_of_runs(folder, inputs):
    for (change,) in inputs:
        write_json(folder / FILE, {"config": to_json(Config()), "data": {}}, change)
        reads_or_refuses(lambda: from_json(read_run_config(folder)["config"]), FILE, "--")


@fuzz(st.binary(max_size=60) | VALUES.map(lambda v: json.dumps({"text": v}).encode()), st.booleans())
def test_documents(folder, inputs):
    for data, compressed in inputs:
        path = folder / ("d.json.gz" if compressed else "d.jsonl")
        path.write_bytes(gzip.compress(data)[: 20 + len(data)] if compressed else data)
        reads_or_refuses(lambda: list(Documents(str(path))), str(path))  # noqa: B023
