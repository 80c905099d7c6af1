"""Reading and writing safetensors against the safetensors library and against transformers' own files."""

import json
import pathlib
import shutil

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from models.huggingface.files import DTYPES, INDEX, SINGLE, Reader, Spec, Writer

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "huggingface"
LARGE = 2**30
VALUES = {
    "b.weight": np.arange(6, dtype=np.float32).reshape(2, 3).T,  # not contiguous
    "a.weight": np.arange(4).astype(ml_dtypes.bfloat16),
    "c": np.full((2, 0), 1, np.float16),
    "d": np.arange(5, dtype=np.uint8),
    "e": np.arange(6).astype(ml_dtypes.float8_e4m3fn).reshape(3, 2),
    "é": np.float32([[-0.0, np.inf, np.nan]]),
}


def specs(values):
    spelled = {dtype: name for name, dtype in DTYPES.items()}
    return {name: Spec(spelled[v.dtype], v.shape) for name, v in values.items()}


def write(folder, values, largest=LARGE):
    with Writer(folder, specs(values), largest) as writer:
        for name in sorted(values, reverse=True):  # the order of writing does not matter
            writer.write(name, values[name])


def test_files_are_the_library_s_bytes(tmp_path):
    write(tmp_path, VALUES)
    contiguous = {name: np.ascontiguousarray(v) for name, v in VALUES.items()}
    safetensors.numpy.save_file(contiguous, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / SINGLE).read_bytes() == (tmp_path / "theirs").read_bytes()


def test_what_is_written_is_read(tmp_path):
    write(tmp_path, VALUES, largest=16)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 1
    with Reader(tmp_path) as reader:
        assert reader.specs == specs(VALUES)
        for name, value in VALUES.items():
            np.testing.assert_array_equal(reader.read(name), value)


def copy(tmp_path, name="llama3.1"):
    return pathlib.Path(shutil.copytree(GOLDEN / name, tmp_path / name))


def truncate(path, remove):
    path.write_bytes(path.read_bytes()[:-remove])


def break_index(folder, change):
    raw = json.loads((folder / INDEX).read_text())
    change(raw["weight_map"])
    (folder / INDEX).write_text(json.dumps(raw))


OUTSIDE = "../x.safetensors", ".h.safetensors", "a\0.safetensors", "config.json", "", 3, None, ["x"]
SECOND = "model-00002-of-00003.safetensors"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: truncate(f / SECOND, 1), "00002-of-00003.safetensors is truncated"),
        (lambda f: (f / SECOND).write_bytes(b""), "is truncated"),
        (lambda f: (f / SECOND).write_bytes(b"\xff" * 100), "not a safetensors file"),
        (lambda f: (f / SECOND).unlink(), "00002-of-00003.safetensors is missing"),
        (lambda f: (f / INDEX).write_text("{"), "index.json is not JSON"),
        (lambda f: (f / INDEX).write_text("[]"), "index.json must hold an object"),
        (lambda f: (f / INDEX).write_text('{"weight_map": []}'), "has no weight_map"),
        (lambda f: (f / INDEX).unlink(), "holds neither"),
        (lambda f: break_index(f, lambda m: m.pop("model.norm.weight")), "differ in model.norm.weight"),
        (lambda f: break_index(f, lambda m: m.update(extra=SECOND)), "differ in extra"),
        *(
            (lambda f, n=n: break_index(f, lambda m: m.update(extra=n)), "no .safetensors file of its folder")
            for n in OUTSIDE
        ),
    ],
)
def test_damaged_checkpoints_say_what_is_wrong(tmp_path, damage, message):
    folder = copy(tmp_path)
    damage(folder)
    with pytest.raises(ValueError, match=message):
        Reader(folder)


@pytest.mark.parametrize(
    ("name", "what_to_do"),
    [
        ("pytorch_model.bin", "safe_serialization=True"),
        ("model.gguf", "the safetensors that its GGUF was made"),
    ],
)
def test_other_weights_are_refused_with_what_to_do(tmp_path, name, what_to_do):
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=what_to_do):
        Reader(tmp_path)


def test_a_tensor_left_out_is_an_error(tmp_path):
    with (
        pytest.raises(ValueError, match="never written: a, b"),
        Writer(tmp_path, {"a": Spec("F32", (1,)), "b": Spec("F32", (1,))}, LARGE),
    ):
        pass
