"""Hugging Face checkpoints to and from runs, against files that transformers 4 and 5 wrote, and live."""

import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eval as evaluation_program
import mxjax
import train as training_program
from models import llama
from models.configs import LlamaConfig, RopeScaling, from_dict, get_config, to_dict
from models.huggingface import export_checkpoint, import_checkpoint
from models.huggingface_config import read_config, write_config
from models.huggingface_tensors import shapes, views
from models.safetensors_files import Reader, Spec, Writer
from mxjax.training.checkpoint import Checkpoints
from mxjax.training.config import parse
from mxjax.training.indexed import IndexedDataset
from mxjax.training.tokenize import TokenizeConfig, tokenize

ROOT = pathlib.Path(__file__).parent.parent
GOLDEN = pathlib.Path(__file__).parent / "golden" / "huggingface"
NAMES = ("llama2", "llama3", "llama3.1", "llama3.2")
SMALL = LlamaConfig(300, 64, 2, 4, 2, 16, 96, rope_theta=10_000.0)


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """The runs made of the golden checkpoints, by name."""
    folder = tmp_path_factory.mktemp("runs")
    for name in NAMES:
        import_checkpoint(GOLDEN / name, folder / name)
    return {name: folder / name for name in NAMES}


def params_of(run):
    config = from_dict(json.loads((run / "config.json").read_text())["model"])
    with Checkpoints(run / "checkpoints") as checkpoints:
        return config, checkpoints.restore_params(shapes(config))


def logits_of(config, params, tokens):
    policies = llama.layer_policies(config, "fp32", [("*", "fp32")])
    run = jax.jit(lambda p, t: llama.apply(config, p, t, policies=policies, dtype=jnp.float32))
    return np.asarray(run(params, jnp.asarray(tokens)))


def tensors(folder):
    with Reader(folder) as reader:
        return {name: (spec, reader.read(name).tobytes()) for name, spec in reader.specs.items()}


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(imported, name):
    with np.load(GOLDEN / name / "logits.npz") as golden:
        ours = logits_of(*params_of(imported[name]), golden["tokens"])
        assert np.max(np.abs(ours - golden["logits"])) < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_export_gives_back_the_bytes_that_were_imported(imported, tmp_path, name):
    shard = {"llama3.1": 40_000, "llama3.2": 20_000}.get(name, 1e9) / 1e9
    export_checkpoint(imported[name], tmp_path / "out", shard_gb=shard)
    assert tensors(tmp_path / "out") == tensors(GOLDEN / name)
    weights = [*(GOLDEN / name).glob("*.safetensors"), *(GOLDEN / name).glob("*.index.json")]
    for file in weights:
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    for file in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / file).read_text()) == json.loads(
            (GOLDEN / name / file).read_text()
        )


def test_configurations_are_read(imported):
    found = {name: params_of(run)[0] for name, run in imported.items()}
    small = LlamaConfig(64, 32, 2, 4, 4, 8, 64, rope_theta=10_000.0)
    llama31 = RopeScaling(8.0, 1.0, 4.0, 16)
    grouped = dataclasses.replace(small, n_kv_heads=2, rope_theta=500_000.0, norm_eps=1e-6)
    assert found == {
        "llama2": small,
        "llama3": grouped,
        "llama3.1": dataclasses.replace(grouped, rope_scaling=llama31),
        "llama3.2": dataclasses.replace(
            grouped,
            n_kv_heads=1,
            head_dim=16,
            tied=True,
            rope_scaling=dataclasses.replace(llama31, factor=32.0),
        ),
    }


@pytest.mark.parametrize("name", ["tiny", "350m", "llama3.2-1b", "llama3.1-405b"])
def test_configurations_round_trip(name):
    config = get_config(name)
    assert read_config(json.loads(json.dumps(write_config(config, 2048)))) == config
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_meta_s_llama_2_needs_no_rope_fields():
    """meta-llama/Llama-2-7b-hf's config.json: no head_dim, rope_theta or attention_bias."""
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "use_cache": True,
        "vocab_size": 32000,
    }
    config = read_config(raw)
    assert config == LlamaConfig(32_000, 4096, 32, 32, 32, 128, 11_008, rope_theta=10_000.0)
    assert config.n_params == 6_738_415_616  # the size of that checkpoint


def golden_raw(name="llama3.2"):
    return json.loads((GOLDEN / name / "config.json").read_text())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2"}, "model_type is 'qwen2'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"hidden_size": None}, "hidden_size must be a positive integer"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be"),
        ({"num_key_value_heads": 3}, "multiple of n_kv_heads"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "lacks high_freq_factor, low_freq"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "does not take full_attention"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": 3}, "must be an object"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, "rope type 'dynamic'"),
    ],
)
def test_other_models_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        read_config(golden_raw() | change)


def rewrite(folder, change):
    """Replaces a one-file checkpoint's tensors by change(tensors)."""
    with Reader(folder) as reader:
        values = change({name: (spec, reader.read(name)) for name, spec in reader.specs.items()})
    with Writer(folder, {name: spec for name, (spec, _) in values.items()}, 2**30) as writer:
        for name, (_, value) in values.items():
            writer.write(name, value)


Q = "model.layers.1.self_attn.q_proj.weight"
BYTES = (Spec("U8", (32, 32)), np.zeros((32, 32), np.uint8))
FREQUENCIES = (Spec("F32", (4,)), np.ones(4, np.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {k: v for k, v in t.items() if k != Q}, f"{Q} is missing"),
        (lambda t: t | {"model.layers.0.self_attn.q_proj.bias": t["model.norm.weight"]}, "does not belong"),
        (
            lambda t: t | {Q: t["model.layers.1.mlp.up_proj.weight"]},
            r"is \[64, 32\] and .* makes it \[32, 32\]",
        ),
        (lambda t: t | {Q: BYTES}, "is in U8"),
    ],
)
def test_other_tensors_are_refused(tmp_path, change, message):
    folder = pathlib.Path(shutil.copytree(GOLDEN / "llama3", tmp_path / "llama3"))
    rewrite(folder, change)
    with pytest.raises(ValueError, match=message):
        import_checkpoint(folder, tmp_path / "run")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["llama3"]  # nothing half-made is left


def test_tensors_that_hold_nothing_of_their_own_are_left_out(tmp_path, imported):
    folder = pathlib.Path(shutil.copytree(GOLDEN / "llama2", tmp_path / "llama2"))
    rewrite(folder, lambda t: t | {"model.layers.0.self_attn.rotary_emb.inv_freq": FREQUENCIES})
    import_checkpoint(folder, tmp_path / "run")
    jax.tree.map(
        np.testing.assert_array_equal, params_of(tmp_path / "run")[1], params_of(imported["llama2"])[1]
    )


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_head_may_be_there_if_it_is_the_embedding(tmp_path, same):
    folder = pathlib.Path(shutil.copytree(GOLDEN / "llama3", tmp_path / "llama3"))
    raw = golden_raw("llama3") | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(raw))
    if same:
        rewrite(folder, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"]})
        assert import_checkpoint(folder, tmp_path / "run").tied
    else:
        with pytest.raises(ValueError, match=r"lm_head\.weight is another"):
            import_checkpoint(folder, tmp_path / "run")


def test_folders_in_use_and_no_checkpoints_are_refused(tmp_path, imported):
    with pytest.raises(ValueError, match="is not an empty folder"):
        import_checkpoint(GOLDEN / "llama2", imported["llama2"])
    with pytest.raises(ValueError, match=r"no Hugging Face checkpoint: it has no config\.json"):
        import_checkpoint(tmp_path, tmp_path / "run")
    with pytest.raises(ValueError, match="holds no run"):
        export_checkpoint(tmp_path, tmp_path / "out")
    with pytest.raises(ValueError, match="no checkpoint of step 7"):
        export_checkpoint(imported["llama2"], tmp_path / "out", step=7)
    with pytest.raises(ValueError, match="must be positive"):
        export_checkpoint(imported["llama2"], tmp_path / "out", shard_gb=0)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        import_checkpoint(tmp_path, tmp_path / "run")


def test_other_dtypes_are_exported(imported, tmp_path):
    for dtype, spelled in (("float32", "F32"), ("bfloat16", "BF16"), ("float16", "F16")):
        export_checkpoint(imported["llama3"], tmp_path / dtype, dtype=dtype)
        found = tensors(tmp_path / dtype)
        assert {spec.dtype for spec, _ in found.values()} == {spelled}
        assert json.loads((tmp_path / dtype / "config.json").read_text())["dtype"] == dtype
        import_checkpoint(tmp_path / dtype, tmp_path / f"{dtype}-run")
        jax.tree.map(
            np.testing.assert_array_equal,
            params_of(tmp_path / f"{dtype}-run")[1],
            params_of(imported["llama3"])[1],
        )


# Whole runs: their vocabulary holds the bytes of a text.

FLAGS = ["--batch-size", "4", "--seq-len", "32", "--eval-batches", "2", "--warmup-steps", "2"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"line {i}: the square is {i * i}\n" for i in range(2000)))
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A random Llama with a vocabulary of 300, as a Hugging Face checkpoint with a tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    config = SMALL
    params = jax.tree.map(np.asarray, llama.init(config, jax.random.key(0)))
    rewrite_params(folder, config, params)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "README.md").write_text("of the original")
    return folder


def rewrite_params(folder, config, params):
    named = {n: v if v.ndim == 1 else v.reshape(-1, v.shape[-1]) for n, v in views(config, params).items()}
    with Writer(folder, {n: Spec("F32", v.shape) for n, v in named.items()}, 2**30) as writer:
        for name, value in named.items():
            writer.write(name, value)
    (folder / "config.json").write_text(json.dumps(write_config(config, 64)))


def run(text, out, *flags):
    return training_program.train(parse([*FLAGS, "--data", str(text), "--out", str(out), *flags]))


def test_imported_weights_are_evaluated_and_trained(checkpoint, text, tmp_path):
    import_checkpoint(checkpoint, tmp_path / "imported")
    before = evaluation_program.main(
        evaluation_program.EvalConfig(tmp_path / "imported", data=str(text), batches=2)
    )
    assert (before["step"], before["policy"]) == (0, "bf16")
    shutil.copytree(tmp_path / "imported", tmp_path / "begin")
    steps = ["--steps", "4", "--policy", "bf16", "--lr", "1e-3"]
    run(text, tmp_path / "tuned", "--init", str(tmp_path / "begin"), *steps)
    description = json.loads((tmp_path / "tuned" / "config.json").read_text())
    assert description["model"] == to_dict(SMALL)
    first = json.loads((tmp_path / "tuned" / "metrics.jsonl").read_text().splitlines()[0])
    assert abs(first["loss"] - before["eval_loss"]) < 0.1
    export_checkpoint(tmp_path / "tuned", tmp_path / "out")
    kept = sorted(f.name for f in (tmp_path / "out").iterdir())
    assert kept == ["config.json", "model.safetensors", "tokenizer.json"]
    assert tensors(tmp_path / "out").keys() == tensors(checkpoint).keys()
    # In place, the same weights and steps give the same run.
    run(text, tmp_path / "imported", "--resume", *steps)
    jax.tree.map(
        np.testing.assert_array_equal, params_of(tmp_path / "imported")[1], params_of(tmp_path / "tuned")[1]
    )
    # From then on it is a run like others.
    with pytest.raises(SystemExit, match=r"--lr: the run has 0\.001, the command line 0\.01"):
        run(text, tmp_path / "imported", "--resume", *steps, "--lr", "1e-2")
    # A run that was stopped before its first checkpoint begins anew.
    early = tmp_path / "early"
    early.mkdir()
    shutil.copyfile(tmp_path / "tuned" / "config.json", early / "config.json")
    run(text, early, "--init", str(tmp_path / "begin"), *steps, "--resume")
    jax.tree.map(np.testing.assert_array_equal, params_of(early)[1], params_of(tmp_path / "tuned")[1])
    # Resuming takes the model from the run's own folder.
    shutil.rmtree(tmp_path / "begin")
    out = run(text, tmp_path / "tuned", "--init", str(tmp_path / "begin"), *steps, "--resume")
    assert out == {}


def test_the_tokenizer_of_the_data_is_exported(checkpoint, tmp_path):
    """From text to a checkpoint with its tokenizer, which encodes as it did for training."""
    lines = [json.dumps({"text": f"line {i}: the square is {i * i}"}) for i in range(500)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    prefix = str(tmp_path / "data")
    options = {"train_tokenizer": True, "vocab_size": 290, "append_eod": True, "workers": 1}
    tokenize(TokenizeConfig((str(tmp_path / "text.jsonl"),), prefix, **options))
    import_checkpoint(checkpoint, tmp_path / "imported")
    (tmp_path / "imported" / "huggingface" / "tokenizer.json").unlink()
    run(prefix, tmp_path / "run", "--init", str(tmp_path / "imported"), "--steps", "2", "--policy", "bf16")
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    written = (tmp_path / "out" / "tokenizer.json").read_bytes()
    assert written == (tmp_path / "data.tokenizer.json").read_bytes()
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    first = IndexedDataset(prefix)[0]
    assert tokenizer("line 0: the square is 0")["input_ids"] == list(first[:-1])


def test_beginning_with_another_model_is_refused(checkpoint, imported, text, tmp_path):
    import_checkpoint(checkpoint, tmp_path / "imported")
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copyfile(tmp_path / "imported" / "config.json", empty / "config.json")
    init = ["--init", str(tmp_path / "imported")]
    for flags, message in [
        ([*init, "--model", "60m"], "leave out --model"),
        ([*init, "--vocab-size", "301"], "holds other with 300 tokens"),
        (["--init", str(imported["llama2"])], "text is read as 257 ids, which --vocab-size 64 does not hold"),
        (["--init", str(tmp_path)], "holds no run"),
        (["--init", str(empty)], "has no checkpoint to begin with"),
    ]:
        with pytest.raises(SystemExit, match=message):
            run(text, tmp_path / "run", *flags)
        assert not (tmp_path / "run").exists()


def gpt_oss_values(blocks, scales):
    """What transformers 5.23's convert_moe_packed_tensors computes, in float32: E2M1, low nibble first."""
    e2m1 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    values = np.stack([e2m1[blocks & 15], e2m1[blocks >> 4]], axis=-1)
    values = values.reshape(*blocks.shape[:-1], -1) * np.exp2(scales.astype(np.float32) - 127)[..., None]
    return values.reshape(len(blocks), -1)


def quantized(imported, tmp_path):
    export_checkpoint(imported["llama3.2"], tmp_path / "out", mxfp4="even")
    config, params = params_of(imported["llama3.2"])
    weights = views(config, jax.tree.map(np.asarray, params))
    reader = Reader(tmp_path / "out")
    for name, view in weights.items():
        if "_proj" in name:
            expected = mxjax.quantize(jnp.asarray(view.reshape(-1, view.shape[-1])), scale_rule="even")
            pair = (reader.read(f"{name}_{part}") for part in ("blocks", "scales"))
            yield *pair, np.asarray(mxjax.dequantize(expected))


def test_mxfp4_weights_have_the_layout_of_gpt_oss(imported, tmp_path):
    count = 0
    for blocks, scales, expected in quantized(imported, tmp_path):
        assert blocks.shape == (*scales.shape, 16)
        np.testing.assert_array_equal(gpt_oss_values(blocks, scales), expected)
        count += 1
    assert count == 14
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["quantization_config"]["quant_method"] == "mxfp4"
    with Reader(tmp_path / "out") as reader:
        assert reader.specs["model.embed_tokens.weight"].dtype == "BF16"
    with pytest.raises(ValueError, match="quantization_config"):
        import_checkpoint(tmp_path / "out", tmp_path / "run")


# With transformers installed.


def test_mxfp4_weights_are_what_transformers_dequantizes(imported, tmp_path):
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    for blocks, scales, expected in quantized(imported, tmp_path):
        pair = (torch.from_numpy(a.copy())[None] for a in (blocks, scales))
        theirs = mxfp4.convert_moe_packed_tensors(*pair, dtype=torch.float32)[0].T
        np.testing.assert_array_equal(theirs.numpy(), expected)


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
    (tmp_path / "seed").mkdir()
    rewrite_params(tmp_path / "seed", config, jax.tree.map(np.asarray, llama.init(config, jax.random.key(1))))
    import_checkpoint(tmp_path / "seed", tmp_path / "run")
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
    print("largest logit", np.max(np.abs(theirs)), "largest difference", np.max(np.abs(ours - theirs)))
    assert np.max(np.abs(ours - theirs)) < 1e-4
    # What transformers saves comes back byte for byte.
    model.to(getattr(torch, dtype)).save_pretrained(tmp_path / "theirs")
    import_checkpoint(tmp_path / "theirs", tmp_path / "run2")
    export_checkpoint(tmp_path / "run2", tmp_path / "ours")
    file = "model.safetensors"
    assert (tmp_path / "ours" / file).read_bytes() == (tmp_path / "theirs" / file).read_bytes()


@pytest.mark.slow
def test_the_commands_run(checkpoint, tmp_path):
    def command(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "models.huggingface", *map(str, arguments)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    assert "100,160 parameters" in command("import", checkpoint, tmp_path / "run").stdout
    done = command("export", tmp_path / "run", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert tensors(tmp_path / "out") == tensors(checkpoint)
    failed = command("import", checkpoint, tmp_path / "run")
    assert failed.returncode == 1
    assert "error:" in failed.stderr
    assert "is not an empty folder" in failed.stderr
    assert "Traceback" not in failed.stderr
