"""The files of a Hugging Face checkpoint: the folder, and safetensors in one file or in shards with an index.

Checkpoints come from others. Nothing outside a checkpoint's folder is read or copied because of what is in
it, and whatever is read has a bounded size. Tensors are read and written one by one, so that memory holds
one at a time. The files are byte for byte those that safetensors itself writes. A new folder appears when it
is complete.

Source: huggingface/safetensors, README "Format"; transformers' `save_pretrained` for names and the index.
"""

import contextlib
import fcntl
import json
import math
import os
import pathlib
import re
import shutil
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import safetensors

from models.received import LARGEST, open_received, read_object
from models.received import read_json as read_value

_KEPT_SUFFIXES = {".json", ".jinja", ".model", ".txt", ""}


def check_files(folder: pathlib.Path) -> None:
    """Checks the entries of a folder, except hidden ones, before any of them is opened.

    A link may lead to a file of the same folder, or, as in the Hub's cache, to `../../blobs`.

    Raises:
      ValueError: there is no such folder, or it holds another link, a pipe, a socket or a device.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder with a Hugging Face checkpoint")
    here = folder.resolve()
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        leads_to = pathlib.Path(os.path.realpath(path)).parent
        if path.is_symlink() and leads_to not in (here, here.parent.parent / "blobs"):
            raise ValueError(
                f"{path} is a link out of its folder, to {os.path.realpath(path)}; replace it by the file or "
                "remove it"
            )
        if not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path} is not a file but a pipe, socket, device or broken link; remove it")


def small_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of a checkpoint except its weights: configuration, tokenizer, license.

    Raises:
      ValueError: the folder holds something that `check_files` refuses, such a file is large or missing, or
        one named .json is no JSON.
    """
    check_files(folder)
    files = sorted(f for f in folder.glob("*") if f.is_file() and not f.name.startswith("."))
    small = [f for f in files if f.suffix in _KEPT_SUFFIXES and not f.name.endswith(".index.json")]
    for file in small:
        if file.suffix == ".json":
            read_value(file)
        else:
            open_received(file, largest=LARGEST, text=False).close()
    return small


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Raises:
      ValueError: the file is missing, too large, malformed, or nested too deeply.
    """
    if not path.is_file():
        raise ValueError(f"{path.parent} is not a Hugging Face checkpoint: it has no file {path.name}")
    return read_object(path)


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    """Writes an object as JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n")


@contextlib.contextmanager
def new_folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary folder that is renamed to `path` at the end, or removed after an error.

    It also removes what earlier processes that were killed left behind. The system unlocks a folder when
    its process ends, however it ends.

    Raises:
      ValueError: `path` exists and is not an empty folder.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} is not an empty folder; name another")
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.iterdir():
        if left.name.startswith(f".{path.name}.") and left.name.endswith(".partial"):
            with contextlib.suppress(OSError), _locked(left):  # in use, or removed by another process
                shutil.rmtree(left)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.mkdir()
    try:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # without locks, as on NFS, nobody removes it
                stack.enter_context(_locked(partial))
            yield partial
            if path.exists():
                path.rmdir()
            partial.replace(path)
    except OSError as error:
        if error.filename is None:  # writes to open files name no path
            error.filename = str(path)
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
    """Locks a folder; raises OSError if another process has locked it, or the file system has no locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


DTYPES: Mapping[str, np.dtype] = types.MappingProxyType(
    {
        # In the order of tensors in a file.
        "F32": np.dtype(np.float32),
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "F16": np.dtype(np.float16),
        "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
        "U8": np.dtype(np.uint8),
    }
)
"""The dtypes of tensors by their names in safetensors; transformers uses NumPy's names."""
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LARGEST_HEADER = 100_000_000  # bytes; safetensors accepts no more


class Spec(NamedTuple):
    """The dtype of a tensor, as a key of `DTYPES`, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def n_elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self.n_elements * self.numpy_dtype.itemsize

    @property
    def numpy_dtype(self) -> np.dtype:
        """The dtype in NumPy."""
        return DTYPES[self.dtype]


def spelling(dtype: str) -> str:
    """Returns safetensors' name of a dtype such as "bfloat16"."""
    return next(name for name, ours in DTYPES.items() if ours.name == dtype)


class Reader:
    """The tensors of a folder's model.safetensors, or of the shards that its index names. A context manager.

    Attributes:
      specs: dtype and shape of every tensor.
    """

    def __init__(self, folder: pathlib.Path):
        """Opens every file and reads its header.

        Raises:
          ValueError: files are missing, truncated or not safetensors, or the index is wrong.
        """
        self._stack = contextlib.ExitStack()
        self._files: dict[str, safetensors.safe_open] = {}
        self._float8: dict[str, tuple[pathlib.Path, int]] = {}  # file, offset
        self.specs: dict[str, Spec] = {}
        with contextlib.ExitStack() as opening:
            opening.callback(self._stack.close)
            for path, names in _files(folder).items():
                self._open(path, names)
            opening.pop_all()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *exception) -> None:
        self._stack.close()

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor in its own dtype."""
        if name not in self._float8:
            return self._files[name].get_tensor(name)
        path, start = self._float8[name]  # NumPy has no such dtype, and safetensors asks for it
        shape = self._files[name].get_slice(name).get_shape()
        values = np.fromfile(path, DTYPES["F8_E4M3"], math.prod(shape), offset=start)
        return values.reshape(shape)

    def packed_weights(self) -> frozenset[str]:
        """Returns the names of the matrices in MXFP4 that `read_packed` takes."""
        return frozenset()

    def read_packed(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the bytes of a matrix in MXFP4: elements [out, in / 2] and scales [out, in / 32]."""
        raise NotImplementedError(f"{name} is not packed")

    def _open(self, path: pathlib.Path, names: set[str] | None) -> None:
        try:
            open_received(path, text=False).close()
            file = self._stack.enter_context(safetensors.safe_open(path, framework="np"))
        except FileNotFoundError:
            raise ValueError(f"{path} is missing: the index names it; download it again") from None
        except (safetensors.SafetensorError, OSError) as error:
            raise ValueError(
                f"{path} is truncated or not a safetensors file ({error}); download it again"
            ) from None
        found = set(file.keys())
        if names is not None and found != names:
            raise ValueError(
                f"{path} and the index differ in {', '.join(sorted(found ^ names)[:5])}; download both again"
            )
        for name in found:
            part = file.get_slice(name)
            self.specs[name] = Spec(part.get_dtype(), tuple(part.get_shape()))
            self._files[name] = file
        if any(self.specs[name].dtype == "F8_E4M3" for name in found):
            starts = _offsets(path)
            self._float8 |= {n: (path, starts[n]) for n in found if self.specs[n].dtype == "F8_E4M3"}


def _offsets(path: pathlib.Path) -> dict[str, int]:
    """Returns where each tensor begins in a file whose header safetensors has checked."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    return {name: 8 + size + e["data_offsets"][0] for name, e in header.items() if name != "__metadata__"}


class Writer:
    """Writes tensors, in any order, into new files of a folder. A context manager.

    Every file has its final size from the start, and every tensor a fixed position.
    """

    def __init__(self, folder: pathlib.Path, specs: Mapping[str, Spec], largest: int):
        """Creates the files, shards of up to `largest` bytes, and their index if there are several.

        A larger tensor becomes a shard of its own.
        """
        self._specs = specs
        self._places: dict[str, tuple[int, int]] = {}  # file descriptor, offset
        self._written: set[str] = set()
        self._stack = contextlib.ExitStack()
        shards = _shards(specs, largest)
        count = len(shards)
        names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        for name, shard in zip([SINGLE] if count == 1 else names, shards, strict=True):
            self._create(folder / name, shard)
        if count > 1:
            files = {tensor: file for file, shard in zip(names, shards, strict=True) for tensor in shard}
            counts, sizes = zip(*((spec.n_elements, spec.size) for spec in specs.values()), strict=True)
            totals = {"total_parameters": sum(counts), "total_size": sum(sizes)}
            index = {"metadata": totals, "weight_map": dict(sorted(files.items()))}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind, *exception) -> None:
        self._stack.close()
        if kind is None and (missing := self._specs.keys() - self._written):
            raise ValueError(f"never written: {', '.join(sorted(missing))}")

    def write(self, name: str, value: np.ndarray) -> None:
        """Writes a tensor, whose dtype and shape must match its spec."""
        spec = self._specs[name]
        assert (value.dtype, value.shape) == (spec.numpy_dtype, spec.shape), (name, value.dtype, value.shape)
        file, start = self._places[name]
        data = memoryview(np.ascontiguousarray(value).view(np.uint8).reshape(-1))
        done = 0
        while done < len(data):  # one call writes up to 2 GiB
            done += os.pwrite(file, data[done:], start + done)
        self._written.add(name)

    def _create(self, path: pathlib.Path, shard: Mapping[str, Spec]) -> None:
        header, offsets, size = _header(shard)
        file = self._stack.enter_context(path.open("wb"))
        file.write(header)
        file.truncate(len(header) + size)
        file.flush()
        self._places |= {name: (file.fileno(), len(header) + start) for name, start in offsets.items()}


def _files(folder: pathlib.Path) -> dict[pathlib.Path, set[str] | None]:
    """Returns the files to read, each with its tensors by the index; None without an index."""
    if (folder / SINGLE).exists():
        return {folder / SINGLE: None}
    if not (folder / INDEX).exists():
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pth"))
        hint = "; save the model with safe_serialization=True" if pickled else ""
        if any(folder.glob("*.gguf")):
            hint = "; import the safetensors that its GGUF was made from"
        raise ValueError(f"{folder} holds neither {SINGLE} nor {INDEX}{hint}")
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict):
        raise ValueError(f"{folder / INDEX} has no weight_map; download it again")
    files: dict[pathlib.Path, set[str] | None] = {}
    for tensor, file in places.items():
        if not isinstance(file, str) or not re.fullmatch(r"[\w-][\w.-]*\.safetensors", file):
            raise ValueError(
                f"{folder / INDEX} puts {tensor} into {file!r}, which is no .safetensors file of its folder"
            )
        names = files.setdefault(folder / file, set())
        assert names is not None
        names.add(tensor)
    return files


def _shards(specs: Mapping[str, Spec], largest: int) -> list[dict[str, Spec]]:
    """Splits the tensors, in order, into shards of up to `largest` bytes.

    huggingface_hub.split_state_dict_into_shards_factory gives the same split, but brings an HTTP client.
    """
    shards: list[dict[str, Spec]] = [{}]
    size = 0
    for name, spec in specs.items():
        if shards[-1] and size + spec.size > largest:
            shards.append({})
            size = 0
        shards[-1][name] = spec
        size += spec.size
    return shards


def _header(shard: Mapping[str, Spec]) -> tuple[bytes, dict[str, int], int]:
    """Returns a file's header, the offset of each tensor after it, and the size of all tensors."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    order, offsets, end = list(DTYPES), {}, 0
    for name, spec in sorted(shard.items(), key=lambda item: (order.index(item[1].dtype), item[0])):
        offsets[name], end = end, end + spec.size
        place = [offsets[name], end]
        entries[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": place}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _LARGEST_HEADER:
        raise ValueError(f"{len(shard)} tensors are too many for one safetensors file")
    return len(text).to_bytes(8, "little") + text, offsets, end
