"""Hugging Face checkpoints to and from runs, against files that transformers 4 and 5 wrote, and live."""

import dataclasses
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from support.llamas import GOLDEN, NAMES, SMALL, golden_raw, imported, logits_of, params_of, rewrite, tensors

from models import decoder
from models.configs import RopeScaling
from models.huggingface.files import Spec
from training.huggingface.exporting import export_checkpoint
from training.huggingface.importing import import_checkpoint
from training.run.record import model_of, read_run_config


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The runs made of the golden checkpoints, by name."""
    folder = tmp_path_factory.mktemp("runs")
    for name in NAMES:
        import_checkpoint(GOLDEN / name, folder / name)
    return {name: folder / name for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(runs, name):
    with np.load(GOLDEN / name / "logits.npz") as golden:
        ours = logits_of(*params_of(runs[name]), golden["tokens"])
        assert np.max(np.abs(ours - golden["logits"])) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_export_gives_back_the_bytes_that_were_imported(runs, tmp_path, name):
    shard = {"llama3.1": 40_000, "llama3.2": 20_000}.get(name, 1e9) / 1e9
    export_checkpoint(runs[name], tmp_path / "out", shard_gb=shard)
    assert tensors(tmp_path / "out") == tensors(GOLDEN / name)
    weights = [*(GOLDEN / name).glob("*.safetensors"), *(GOLDEN / name).glob("*.index.json")]
    for file in weights:
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    for file in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / file).read_text()) == json.loads(
            (GOLDEN / name / file).read_text()
        )


Q = "model.layers.1.self_attn.q_proj.weight"
BYTES = (Spec("U8", (32, 32)), np.zeros((32, 32), np.uint8))
FREQUENCIES = (Spec("F32", (4,)), np.ones(4, np.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {k: v for k, v in t.items() if k != Q}, f"{Q} is missing"),
        (lambda t: t | {"model.layers.0.self_attn.q_proj.bias": t["model.norm.weight"]}, "does not belong"),
        (lambda t: t | {Q: t["model.layers.1.mlp.up_proj.weight"]}, r"\[64, 32\] and .* makes it \[32, 32\]"),
        (lambda t: t | {Q: BYTES}, "is in U8"),
    ],
)
def test_other_tensors_are_refused(tmp_path, change, message):
    folder = pathlib.Path(shutil.copytree(GOLDEN / "llama3", tmp_path / "llama3"))
    rewrite(folder, change)
    with pytest.raises(ValueError, match=message):
        import_checkpoint(folder, tmp_path / "run")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["llama3"]  # nothing half-made is left


def test_tensors_that_hold_nothing_of_their_own_are_left_out(tmp_path, runs):
    folder = pathlib.Path(shutil.copytree(GOLDEN / "llama2", tmp_path / "llama2"))
    rewrite(folder, lambda t: t | {"model.layers.0.self_attn.rotary_emb.inv_freq": FREQUENCIES})
    import_checkpoint(folder, tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, params_of(tmp_path / "run")[1], params_of(runs["llama2"])[1])


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_head_may_be_there_if_it_is_the_embedding(tmp_path, same):
    folder = pathlib.Path(shutil.copytree(GOLDEN / "llama3", tmp_path / "llama3"))
    raw = golden_raw("llama3") | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(raw))
    if same:
        rewrite(folder, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"]})
        import_checkpoint(folder, tmp_path / "run")
        assert model_of(read_run_config(tmp_path / "run")).tied
    else:
        with pytest.raises(ValueError, match=r"lm_head\.weight differs"):
            import_checkpoint(folder, tmp_path / "run")


def test_folders_in_use_and_no_checkpoints_are_refused(tmp_path, runs):
    with pytest.raises(ValueError, match="is not an empty folder"):
        import_checkpoint(GOLDEN / "llama2", runs["llama2"])
    with pytest.raises(ValueError, match=r"not a Hugging Face checkpoint: it has no file config\.json"):
        import_checkpoint(tmp_path, tmp_path / "run")
    with pytest.raises(ValueError, match="holds no run"):
        export_checkpoint(tmp_path, tmp_path / "out")
    with pytest.raises(ValueError, match="no checkpoint of step 7"):
        export_checkpoint(runs["llama2"], tmp_path / "out", step=7)
    for size in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="--shard-gb must be from 1e-9, a byte, to 1e9, got"):
            export_checkpoint(runs["llama2"], tmp_path / "out", shard_gb=size)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        import_checkpoint(tmp_path, tmp_path / "run")


def test_other_dtypes_are_exported(runs, tmp_path):
    for dtype, spelled in (("float32", "F32"), ("bfloat16", "BF16"), ("float16", "F16")):
        export_checkpoint(runs["llama3"], tmp_path / dtype, dtype=dtype)
        found = tensors(tmp_path / dtype)
        assert {spec.dtype for spec, _ in found.values()} == {spelled}
        assert json.loads((tmp_path / dtype / "config.json").read_text())["dtype"] == dtype
        import_checkpoint(tmp_path / dtype, tmp_path / f"{dtype}-run")
        jax.tree.map(
            np.testing.assert_array_equal,
            params_of(tmp_path / f"{dtype}-run")[1],
            params_of(runs["llama3"])[1],
        )


# With transformers installed.


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (SMALL, "float32"),
        (dataclasses.replace(SMALL, tied=True, rope_scaling=RopeScaling(32.0, 1.0, 4.0, 16)), "bfloat16"),
        (dataclasses.replace(SMALL, n_kv_heads=4, head_dim=32, norm_eps=1e-6), "float16"),
    ],
)
def test_transformers_loads_exports_and_agrees(tmp_path, config, dtype):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = dataclasses.replace(config, init_std=0.2)  # logits of a size to compare
    imported(tmp_path, config, decoder.init(config, jax.random.key(1)))
    shutil.rmtree(tmp_path / "run" / "huggingface")  # as if it had been trained here
    export_checkpoint(tmp_path / "run", tmp_path / "out", dtype=dtype, shard_gb=1e-4)
    load = transformers.LlamaForCausalLM.from_pretrained
    model, report = load(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert not any(report.values()), report
    assert str(model.dtype) == f"torch.{dtype}"
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 60))
    with torch.no_grad():
        theirs = model.float()(torch.from_numpy(tokens)).logits.numpy()
    import_checkpoint(tmp_path / "out", tmp_path / "again")
    ours = logits_of(*params_of(tmp_path / "again"), tokens)
    assert np.max(np.abs(ours - theirs)) < 1e-4
    # What transformers saves comes back byte for byte.
    model.to(getattr(torch, dtype)).save_pretrained(tmp_path / "theirs")
    import_checkpoint(tmp_path / "theirs", tmp_path / "run2")
    export_checkpoint(tmp_path / "run2", tmp_path / "ours")
    file = "model.safetensors"
    assert (tmp_path / "ours" / file).read_bytes() == (tmp_path / "theirs" / file).read_bytes()
