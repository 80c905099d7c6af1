"""Runs with --lora on packed weights: what trains, what is kept, resumed, evaluated and exported."""

import json
import shlex
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.llamas import SMALL, imported, params_of

import eval as evaluation_program
import train as training_program
from analysis.evaluate import EvalConfig
from models import decoder, lora
from models.gemms import LINEAR_LAYERS
from training.command_line import parse
from training.huggingface.exporting import export_checkpoint
from training.huggingface.importing import import_checkpoint
from training.memory import device_bytes
from training.run.checkpoints import Checkpoints
from training.run.checksums import saved_tree
from training.run.frozen import frozen_shapes
from training.run.setup import imported_from

pytestmark = pytest.mark.slow
FLAGS = "--lora 4 --policy weight_only --lr 1e-2 --batch-size 4 --seq-len 32 --eval-batches 2"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A checkpoint in MXFP4 as compressed-tensors packs it, imported as it is."""
    folder = tmp_path_factory.mktemp("base")
    run = imported(folder, SMALL, decoder.init(SMALL, jax.random.key(1)))
    export_checkpoint(run, folder / "mxfp4", quantize="mxfp4")
    (folder / "said").write_text(import_checkpoint(folder / "mxfp4", folder / "packed", packed=True))
    return folder


@pytest.fixture(scope="module")
def tuned(base, text, tmp_path_factory):
    """A run of six steps from the packed weights."""
    out = tmp_path_factory.mktemp("tuned") / "run"
    train(base, text, out)
    return out


def train(base, text, out, *more):
    flags = ["--steps", "6", "--init", str(base / "packed"), "--data", str(text), "--out", str(out)]
    return training_program.train(parse([*FLAGS.split(), *flags, *more]))


def adapters_of(run, step=6):
    tree = saved_tree(run / "checkpoints" / str(step) / "params")
    with Checkpoints(run / "checkpoints") as checkpoints:
        like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)
        return checkpoints.restore_params(like, step)


def test_packed_weights_are_the_values_in_a_quarter_of_bfloat16(base):
    """Packed import and import in float32 give the same parameters; 4.25 bits a weight are on the disk."""
    import_checkpoint(base / "mxfp4", base / "whole")
    jax.tree.map(np.testing.assert_array_equal, params_of(base / "packed")[1], params_of(base / "whole")[1])
    saved = saved_tree(base / "packed" / "checkpoints" / "0" / "params")
    assert lora.packed_layers(saved) == sorted(LINEAR_LAYERS)
    down = saved["blocks"]["mlp"]["down"]
    bits = 8 * sum(np.prod(part.shape) for part in down.values()) / np.prod((2, SMALL.d_ff, SMALL.d_model))
    assert bits == 4.25 == 8 * lora.BYTES_PACKED


def test_only_adapters_train_and_are_saved(base, tuned):
    """The frozen copy has the bytes of the import, and moments are those of adapters."""
    for name in ("attention.qkv", "mlp.down"):
        module, matrix = name.split(".")
        assert sorted(adapters_of(tuned)["blocks"][module][matrix]) == ["a", "b"]
    assert max(float(jnp.abs(w).max()) for w in jax.tree.leaves(adapters_of(tuned))) > 0
    moments = jax.tree.leaves(saved_tree(tuned / "checkpoints" / "6" / "rest")["opt_state"])
    adapters = jax.tree.leaves(adapters_of(tuned))
    assert sum(np.prod(m.shape) for m in moments if m.shape) == 2 * sum(w.size for w in adapters)
    frozen = []
    for place in (tuned / "frozen", base / "packed" / "checkpoints"):
        with Checkpoints(place) as checkpoints:
            frozen.append(checkpoints.restore_params(decoder.abstract_params(SMALL), packed=True))
    assert frozen[0]["blocks"]["mlp"]["down"]["codes"].dtype == jnp.uint8
    jax.tree.map(np.testing.assert_array_equal, *frozen)


def test_the_next_command_of_a_packed_import_trains_adapters(base):
    """With the rank and the rate of the documentation."""
    config = parse(shlex.split((base / "said").read_text().partition("python train.py ")[2]))
    assert (config.init, config.lora, config.optimizer.lr) == (base / "packed", 16, 1e-4)


def test_a_resumed_run_has_the_same_adapters(base, text, tuned, tmp_path):
    """Bit for bit, and without the run that it began with."""
    shutil.copytree(base / "packed", tmp_path / "packed")
    train(tmp_path, text, tmp_path / "run", "--stop-after", "3")
    shutil.rmtree(tmp_path / "packed" / "checkpoints")
    train(tmp_path, text, tmp_path / "run", "--resume")
    jax.tree.map(np.testing.assert_array_equal, adapters_of(tmp_path / "run"), adapters_of(tuned))


def test_evaluation_and_merged_export_have_the_loss_of_the_run(tuned, tmp_path):
    """eval.py runs frozen weights and adapters as training does; the export has W + A B."""
    records = [json.loads(line) for line in (tuned / "metrics.jsonl").read_text().splitlines()]
    losses = [record["eval_loss"] for record in records if "eval_loss" in record]
    flops_per_token = records[0]["tflops_per_device"] * 1e12 / records[0]["tokens_per_s"]
    assert flops_per_token == pytest.approx(SMALL.flops_per_token(32, frozen=True))
    assert evaluation_program.evaluate(EvalConfig(tuned, json=True))["eval_loss"] == losses[-1]
    export_checkpoint(tuned, tmp_path / "out", dtype="float32")
    import_checkpoint(tmp_path / "out", tmp_path / "again")
    found = params_of(tmp_path / "again")[1]["blocks"]["mlp"]["down"]
    a, b = (adapters_of(tuned)["blocks"]["mlp"]["down"][part] for part in "ab")
    with Checkpoints(tuned / "frozen") as checkpoints:
        w = checkpoints.restore_params(decoder.abstract_params(SMALL))["blocks"]["mlp"]["down"]
    np.testing.assert_allclose(found, np.asarray(w) + np.asarray(a) @ np.asarray(b), rtol=0, atol=1e-6)


def test_quantized_exports_of_adapters_are_said_to_be_rounded_anew(tuned, tmp_path):
    said = export_checkpoint(tuned, tmp_path / "out", quantize="mxfp4")
    for text in (said, (tmp_path / "out" / "README.md").read_text()):
        assert "adapters merged, then rounded anew, scale rule floor" in text


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT 0.21
def test_peft_merges_the_exported_adapters_as_we_do(base, tuned, tmp_path):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    export_checkpoint(tuned, tmp_path / "adapters", adapters=True)
    export_checkpoint(base / "packed", tmp_path / "base", dtype="float32")
    export_checkpoint(tuned, tmp_path / "merged", dtype="float32")
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = peft.PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "adapters").merge_and_unload()
    theirs = {name: w.detach().numpy() for name, w in model.state_dict().items()}
    ours = load_file(tmp_path / "merged" / "model.safetensors")
    assert theirs.keys() == ours.keys()
    for name, w in ours.items():
        np.testing.assert_allclose(theirs[name], w, atol=1e-6, err_msg=name)
    before = load_file(tmp_path / "base" / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    assert np.abs(before[name] - ours[name]).max() > 1e-4


def test_adapters_have_pefts_names_shapes_and_the_checkpoint_that_they_adapt(base, tuned, tmp_path):
    export_checkpoint(tuned, tmp_path / "adapters", adapters=True)
    found = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.{}_proj.lora_{}.weight"
    shapes = [found[name.format(*part)].shape for part in ("qA", "qB", "vB")]
    assert shapes == [(4, SMALL.d_model), (SMALL.d_model, 4), (2 * SMALL.head_dim, 4)]
    assert len(found) == 2 * 7 * 2
    given = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (given["r"], given["lora_alpha"], len(given["target_modules"])) == (4, 4, 7)
    assert given["base_model_name_or_path"] == str(base / "mxfp4")
    # Whoever may read the configuration may read the weights.
    assert len({path.stat().st_mode for path in (tmp_path / "adapters").iterdir()}) == 1


def test_weights_that_have_trained_are_of_no_checkpoint(base, tuned):
    assert imported_from(base / "packed") == str(base / "mxfp4")
    assert imported_from(tuned) is None is imported_from(None)


def test_the_memory_of_frozen_weights_is_what_they_take(base, text):
    flags = ["--init", str(base / "packed"), "--data", str(text), *FLAGS.split()]
    with Checkpoints(base / "packed" / "checkpoints") as checkpoints:
        read = checkpoints.restore_params(decoder.abstract_params(SMALL), packed=True)
    assert device_bytes(frozen_shapes(parse(flags))) == sum(w.nbytes for w in jax.tree.leaves(read))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lora", "4"], "add --init RUN"),
        (["--lora", "4", "--plan"], "add --init RUN"),
        (["--lora", "4", "--init", "PACKED", "--optimizer", "muon"], "--optimizer muon is for whole weights"),
        (["--lora", "4", "--init", "PACKED", "--no-decay", "head"], "--no-decay is for whole weights"),
        (["--init", "TUNED", "--lr", "1e-5"], "has adapters of --lora"),
    ],
)
def test_what_adapters_cannot_do_is_refused(base, text, tuned, tmp_path, flags, message, capsys):
    places = {"PACKED": str(base / "packed"), "TUNED": str(tuned)}
    given = [places.get(flag, flag) for flag in flags]
    with pytest.raises(SystemExit, match=message):
        training_program.train(parse([*given, "--data", str(text), "--out", str(tmp_path / "out")]))
    assert not (tmp_path / "out").exists()


def test_checkpoints_without_packed_layers_are_refused(base, tuned, tmp_path):
    with pytest.raises(ValueError, match="--packed: no linear layer is packed in MXFP4"):
        import_checkpoint(base / "seed", tmp_path / "out", packed=True)
    with pytest.raises(ValueError, match="--adapters is for runs with --lora"):
        export_checkpoint(base / "packed", tmp_path / "out", adapters=True)
    assert not list(tmp_path.iterdir())
