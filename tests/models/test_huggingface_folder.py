"""Checkpoints that others made: links, pipes, sizes and values that cannot be, and what a kill leaves."""

import fcntl
import json
import os
import pathlib
import shutil
import tracemalloc

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.llamas import GOLDEN, golden_raw, params_of, rewrite

from models.huggingface.files import INDEX, SINGLE
from training.huggingface.importing import import_checkpoint


@pytest.fixture
def checkpoint(tmp_path):
    return pathlib.Path(shutil.copytree(GOLDEN / "llama3", tmp_path / "llama3"))


def refused(checkpoint, message):
    """Imports, expects the error, and that nothing is left of the run."""
    with pytest.raises(ValueError, match=message) as caught:
        import_checkpoint(checkpoint, checkpoint.parent / "run")
    assert not [path for path in checkpoint.parent.iterdir() if "run" in path.name]
    return str(caught.value)


def test_a_link_out_of_the_folder_is_not_followed(checkpoint, tmp_path):
    (tmp_path / "secret").write_text("the key")
    (checkpoint / "tokenizer.json").symlink_to(tmp_path / "secret")
    refused(checkpoint, r"tokenizer.json is a link out of its folder, to .*/secret; replace it by the file")
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / SINGLE).rename(tmp_path / "weights")
    (checkpoint / SINGLE).symlink_to(tmp_path / "weights")
    refused(checkpoint, "model.safetensors is a link out of its folder")
    (checkpoint / SINGLE).unlink()
    (checkpoint / "config.json").rename(tmp_path / "config")
    (checkpoint / "config.json").symlink_to(checkpoint / "missing")
    refused(checkpoint, "config.json is not a file but a pipe, socket, device or broken link")


def test_a_truncated_tokenizer_is_refused(checkpoint):
    (checkpoint / "tokenizer.json").write_text('{"model": {"vocab"')
    refused(checkpoint, "tokenizer.json is not JSON")


def test_a_run_is_no_checkpoint(checkpoint, tmp_path):
    import_checkpoint(checkpoint, tmp_path / "first")
    with pytest.raises(ValueError, match="first is a run, not a Hugging Face checkpoint"):
        import_checkpoint(tmp_path / "first", tmp_path / "second")


def test_the_hub_s_cache_is_read_through_its_links(checkpoint, tmp_path):
    """huggingface_hub keeps files in blobs/ and links to them from snapshots/REVISION."""
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "1a2b", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(checkpoint.iterdir())):
        file.rename(blobs / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    import_checkpoint(snapshot, tmp_path / "run")
    kept = tmp_path / "run" / "huggingface" / "config.json"
    assert not kept.is_symlink()
    assert json.loads(kept.read_text()) == golden_raw("llama3")
    blobs.rename(tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is a link out of its folder"):
        import_checkpoint(snapshot, tmp_path / "again")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_hidden_layers": 2**31 - 1},
            "num_hidden_layers is 2147483647 .* there are tensors of 2 layers",
        ),
        ({"vocab_size": 2**31 - 1}, r"embed_tokens.weight is \[64, 32\] and .* makes it \[2147483647, 32\]"),
        ({"hidden_size": 2**31 - 1, "head_dim": 8}, r"makes it \[64, 2147483647\]"),
        ({"intermediate_size": 2**31 - 1}, r"gate_proj.weight is \[64, 32\] .* makes it \[2147483647, 32\]"),
        ({"head_dim": 2**31 - 2}, r"q_proj.weight is \[32, 32\] and .* makes it \[8589934584, 32\]"),
        ({"num_attention_heads": 2**31 - 2, "num_key_value_heads": 2}, "q_proj.weight is"),
    ],
)
def test_sizes_are_compared_with_the_tensors_before_memory_is_taken(checkpoint, change, message):
    (checkpoint / "config.json").write_text(json.dumps(golden_raw("llama3") | change))
    tracemalloc.start()
    try:
        refused(checkpoint, message)
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("removed", "added", "said"),
    [
        ("model.", "", r"lack 'model\.', as those of a model without its head do: save the \.\.\.ForC"),
        ("", "_orig_mod.", r"begin with '_orig_mod\.', .*: save the module inside, model\._orig_mod, or"),
        ("", "module._orig_mod.", r"begin with 'module\._orig_mod\.'"),
    ],
)
def test_names_of_a_wrapper_are_told_from_a_wrong_config(checkpoint, removed, added, said):
    found = {added + n.removeprefix(removed): t for n, t in load_file(checkpoint / SINGLE).items()}
    save_file(found, checkpoint / SINGLE)
    refused(checkpoint, said)


def test_weights_that_are_not_finite_are_named(checkpoint):
    bad = {"model.norm.weight": np.nan, "model.layers.1.mlp.up_proj.weight": np.inf}

    def spoil(found):
        for name, value in bad.items():
            found[name][1].flat[-1] = value
        return found

    rewrite(checkpoint, spoil)
    message = refused(checkpoint, r"NaN or infinity in .*; download the weights again")
    assert all(name in message for name in bad)
    assert "lm_head" not in message


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_nested_json_is_an_error_of_the_file(checkpoint, name):
    (checkpoint / SINGLE).unlink()
    (checkpoint / name).write_text('{"a":' * 100_000)
    refused(checkpoint, f"{name} is nested too deeply")


def test_what_a_killed_import_left_is_removed_unless_it_is_in_use(checkpoint, tmp_path):
    left, used = (tmp_path / f".run.{number}.partial" for number in (1, 2))
    for folder in (left, used):
        folder.mkdir()
        (folder / "half").touch()
    descriptor = os.open(used, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    import_checkpoint(checkpoint, tmp_path / "run")
    os.close(descriptor)
    assert not left.exists()
    assert used.exists()
    assert params_of(tmp_path / "run")[0].n_layers == 2
