"""Every parser of files that others wrote, on damaged and generated ones: it reads or refuses them.

Refusing is a ValueError raised here, whose message names the file. Another exception, an input that takes
seconds, and gigabytes of memory are failures.
"""

import gzip
import itertools
import json
import linecache
import math
import os
import pathlib
import random
import resource
import signal
import sys
import tempfile
import traceback

import numpy as np
import pytest
from support import oracles
from support.llamas import GOLDEN, NAMES, golden_raw

import mxjax
from models import decoder
from models.configs import get_config, to_dict
from models.huggingface.config import read_config
from models.huggingface.files import INDEX, SINGLE, Reader, read_json
from models.huggingface.weights import check_tensors
from training.config import Config
from training.data.indexed_dataset import IndexedDataset, IndexedWriter
from training.data.megatron import load_validation
from training.data.tokenizer import load_tokenizer, tokenizer_vocab_size
from training.phases import Phase, from_record, to_record
from training.run.record import CONFIG, documents_of_run, from_json, model_of, read_run_config, to_json
from training.tokenize.documents import Documents
from training.tokenize.tokenize import train_tokenizer

pytestmark = pytest.mark.slow

ROOT = f"{pathlib.Path(__file__).parents[2]}{os.sep}"
SECONDS, MEMORY = 5, 2 * 2**30

# Numbers at the ends of types, and what else tends to be forgotten.
LEAVES = [0, -1, 1, 2**31 - 1, 2**31, 2**63 - 1, 2**64, 10**400, 0.5, 1e308, -0.0, 5e-324, math.nan, math.inf]
LEAVES += [None, True, False, "", "\0", "\ud800", "\u2028", "é\U0001f600", "a" * 1000]


def any_value(draw: random.Random, depth: int = 3):
    """Draws a JSON value."""
    kind = draw.randrange(8 if depth else 6)
    if kind < 3:
        return draw.choice(LEAVES)
    if kind == 3:
        return draw.randint(-(2 ** draw.randrange(1, 80)), 2**20)
    if kind == 4:
        return draw.uniform(-1, 1) * 10.0 ** draw.randrange(-30, 30)
    if kind == 5:
        return any_text(draw)
    values = [any_value(draw, depth - 1) for _ in range(draw.randrange(4))]
    return values if kind == 6 else {any_text(draw): value for value in values}


def any_text(draw: random.Random) -> str:
    """Draws a short text: of ASCII, or of any code points."""
    most = draw.choice([127, sys.maxunicode])
    return "".join(chr(draw.randint(0, most)) for _ in range(draw.randrange(6)))


def any_edits(draw: random.Random) -> list[tuple[int, int, bytes]]:
    """Draws one or two edits for `edited`."""
    return [
        (draw.randrange(2**31), draw.randrange(10), draw.randbytes(draw.randrange(10)))
        for _ in range(draw.randint(1, 2))
    ]


def any_change(draw: random.Random):
    """Draws edits of a file's bytes, or the path to a value in its JSON and another value."""
    if draw.random() < 0.5:
        return any_edits(draw)
    return [draw.randrange(100) for _ in range(draw.randrange(5))], any_value(draw)


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


def fault(read, *names: str) -> str:
    """Runs a parser and returns what is wrong: "" if it reads, or refuses by a ValueError as it should.

    That is raised by a line of ours, and holds one of the names.
    """
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        read()
    except ValueError as error:
        refused = error
    else:
        return ""
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    *_, last = traceback.walk_tb(refused.__traceback__)
    file = last[0].f_code.co_filename
    line = linecache.getline(file, last[1]).strip()
    if not file.startswith(ROOT) or not line.startswith("raise "):
        return f"{refused!r} comes from {line!r} in {file}"
    return "" if any(name in str(refused) for name in names) else f"{refused!r} names none of {names}"


@pytest.fixture(params=[2_000, pytest.param(10_000, marks=pytest.mark.exhaustive)])
def draws(request):
    """Returns the same generator of random numbers, once for each input."""
    return itertools.repeat(random.Random(0), request.param)


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


def test_indexed_datasets(draws, folder, dataset):
    def read():
        data = IndexedDataset(folder / "d")
        data.check_ids(100)
        data.gather([0], [len(data.tokens)])
        assert [data[i] for i in range(len(data))]
        load_validation(str(folder / "d"), 100, whole=False)

    for draw in draws:
        suffix, edits = draw.choice([".idx", ".idx", ".bin"]), any_edits(draw)
        for name, data in dataset.items():
            (folder / f"d{name}").write_bytes(edited(data, edits) if name == suffix else data)
        assert not fault(read, str(folder / "d"))


@pytest.fixture(scope="module")
def checkpoint():
    """A small checkpoint's configuration, parsed header, header and data."""
    data = (GOLDEN / "llama3" / SINGLE).read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    return read_config(golden_raw("llama3")), json.loads(data[8:size]), data[:size], data[size:]


def test_safetensors(draws, folder, checkpoint):
    config, parsed, header, data = checkpoint

    def read():
        with Reader(folder) as reader:
            check_tensors(reader.specs, config)
            for name in reader.specs:
                reader.read(name)

    for draw in draws:
        change = any_change(draw)
        text = json.dumps(changed(parsed, *change)).encode() if isinstance(change, tuple) else b""
        new = len(text).to_bytes(8, "little") + text if text else edited(header, change)
        (folder / SINGLE).write_bytes(new + data)
        assert not fault(read, str(folder / SINGLE), "the tensors do not match", "config.json: ")


def changed_json(value, change) -> bytes:
    """Returns the text of a JSON value, changed inside or damaged as text."""
    if isinstance(change, tuple):
        return json.dumps(changed(value, *change)).encode()
    return edited(json.dumps(value).encode(), change)


def write_json(path, value, change):
    path.write_bytes(changed_json(value, change))


def test_the_index_of_shards(draws, folder):
    (folder / SINGLE).unlink(missing_ok=True)
    whole = json.loads((GOLDEN / "llama3.1" / INDEX).read_text())
    for draw in draws:
        write_json(folder / INDEX, whole, any_change(draw))
        assert not fault(lambda: Reader(folder), str(folder))


def test_hugging_face_configurations(draws, folder):
    whole = [golden_raw(name) for name in NAMES]
    for draw in draws:
        write_json(folder / "raw.json", draw.choice(whole), any_change(draw))
        assert not fault(lambda: read_config(read_json(folder / "raw.json")), "config.json", "raw.json")


@pytest.fixture(scope="module")
def tokenizer(folder):
    (folder / "text.txt").write_text("the square of the number is the number times the number")
    return json.loads(train_tokenizer([str(folder / "text.txt")], "text", 270, 1000))


def test_tokenizers(draws, folder, tokenizer):
    path = folder / "tokenizer.json"

    def vocab_size():
        assert 0 < tokenizer_vocab_size(path) <= 2**31

    for draw in draws:
        write_json(path, tokenizer, any_change(draw))
        assert not fault(vocab_size, str(path))
        assert not fault(lambda: load_tokenizer(path), str(path))


def test_policies(draws):
    whole = [json.loads(mxjax.policy_to_json(mxjax.get_policy(name))) for name in mxjax.policies()]
    with oracles.types_unchecked():
        for draw in draws:
            data = changed_json(draw.choice(whole), any_change(draw))
            text = data.decode(errors="replace")
            assert not fault(lambda: mxjax.policy_from_json(text), "")  # noqa: B023


PATHS = ["", "wgrad.", "wgrad.rhs.", "wgrad.rhs.block_shape=", "*.rotation="]


def test_changes_of_policies(draws):
    with oracles.types_unchecked():
        for draw in draws:
            text = json.dumps(any_value(draw))
            if draw.random() < 0.5:
                text = "".join(draw.choices('abcdefghlmnoprstuw.*=[]{},0123456789"-', k=draw.randrange(41)))
            change = draw.choice(PATHS) + text
            assert not fault(lambda: mxjax.set_fields(mxjax.Policy(), [change]), "")  # noqa: B023


def test_configurations_of_runs(draws, folder):
    layers = decoder.layer_policies(get_config("tiny"), mxjax.get_policy("wgrad"))
    model = {"model": to_dict(get_config("tiny"))}
    data = {"data": {"source": "text", "train_tokens": 9, "validation_tokens": 9, "crc32": "0"}}
    data["documents"] = {"end": 256, "restart_positions": False}
    whole = {"config": to_json(Config()), **data, **model, **to_record([Phase(1, "wgrad", layers)])}

    def read():
        saved = read_run_config(folder)
        from_json(saved["config"]), model_of(saved), documents_of_run(saved), from_record(saved)

    with oracles.types_unchecked():
        for draw in draws:
            write_json(folder / CONFIG, whole, any_change(draw))
            assert not fault(read, CONFIG, "--")


def test_documents(draws, folder):
    for draw in draws:
        data = draw.randbytes(draw.randrange(61))
        if draw.random() < 0.5:
            data = json.dumps({"text": any_value(draw)}).encode()
        compressed = draw.random() < 0.5
        path = folder / ("d.json.gz" if compressed else "d.jsonl")
        path.write_bytes(gzip.compress(data)[: 20 + len(data)] if compressed else data)
        assert not fault(lambda: list(Documents(str(path))), str(path))  # noqa: B023
