"""Whole runs that begin with a Hugging Face checkpoint and end in one, on the bytes of a text."""

import dataclasses
import json
import os
import shlex
import shutil
import signal
import sys
import time

import jax
import numpy as np
import pytest
from support import runs
from support.llamas import GOLDEN, SMALL, params_of, rewrite_params, tensors

import eval as evaluation_program
import train as training_program
from models import decoder
from models.configs import get_config, to_dict
from training.command_line import parse
from training.data.indexed_dataset import IndexedDataset
from training.huggingface import __main__ as huggingface_program
from training.huggingface import importing
from training.huggingface.exporting import export_checkpoint
from training.huggingface.importing import import_checkpoint
from training.huggingface.model_card import model_card
from training.run.record import to_json
from training.run.setup import check_rate
from training.tokenize.plan import TokenizeConfig
from training.tokenize.tokenize import tokenize


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A random Llama with a vocabulary of 300, as a Hugging Face checkpoint with a tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    config = SMALL
    params = jax.tree.map(np.asarray, decoder.init(config, jax.random.key(0)))
    rewrite_params(folder, config, params)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "README.md").write_text("of the original")
    return folder


@pytest.fixture(scope="module")
def llama2(tmp_path_factory):
    """The run made of a golden checkpoint, whose vocabulary is too small for bytes."""
    folder = tmp_path_factory.mktemp("runs") / "llama2"
    import_checkpoint(GOLDEN / "llama2", folder)
    return folder


@pytest.mark.slow
def test_imported_weights_are_evaluated_and_trained(checkpoint, text, tmp_path):
    import_checkpoint(checkpoint, tmp_path / "imported")
    (tmp_path / "imported" / "huggingface" / "tokenizer.json").unlink()  # its tokens are bytes here
    before = evaluation_program.evaluate(
        evaluation_program.EvalConfig(tmp_path / "imported", data=str(text), batches=2)
    )
    assert (before["step"], before["policy"]) == (0, "bf16")
    shutil.copytree(tmp_path / "imported", tmp_path / "begin")
    steps = ["--steps", "4", "--policy", "bf16", "--lr", "1e-3"]
    runs.run(text, tmp_path / "tuned", "--init", str(tmp_path / "begin"), *steps)
    description = json.loads((tmp_path / "tuned" / "config.json").read_text())
    assert description["model"] == json.loads(json.dumps(to_dict(SMALL)))
    first = json.loads((tmp_path / "tuned" / "metrics.jsonl").read_text().splitlines()[0])
    assert abs(first["loss"] - before["eval_loss"]) < 0.1
    export_checkpoint(tmp_path / "tuned", tmp_path / "out")
    kept = sorted(f.name for f in (tmp_path / "out").iterdir())
    assert kept == ["README.md", "config.json", "model.safetensors"]
    assert tensors(tmp_path / "out").keys() == tensors(checkpoint).keys()
    # In place, the same weights and steps give the same run.
    runs.run(text, tmp_path / "imported", "--resume", *steps)
    jax.tree.map(
        np.testing.assert_array_equal, params_of(tmp_path / "imported")[1], params_of(tmp_path / "tuned")[1]
    )
    # From then on it is a run like others.
    with pytest.raises(SystemExit, match=r"--lr: the run has 0\.001, the command line 0\.01"):
        runs.run(text, tmp_path / "imported", "--resume", *steps, "--lr", "1e-2")
    # A run that was stopped before its first checkpoint begins anew.
    early = tmp_path / "early"
    early.mkdir()
    shutil.copyfile(tmp_path / "tuned" / "config.json", early / "config.json")
    runs.run(text, early, "--init", str(tmp_path / "begin"), *steps, "--resume")
    jax.tree.map(np.testing.assert_array_equal, params_of(early)[1], params_of(tmp_path / "tuned")[1])
    # Resuming takes the model from the run's own folder.
    shutil.rmtree(tmp_path / "begin")
    out = runs.run(text, tmp_path / "tuned", "--init", str(tmp_path / "begin"), *steps, "--resume")
    assert out == {}


@pytest.mark.slow
def test_the_tokenizer_of_the_data_is_exported(checkpoint, tmp_path, monkeypatch, capsys):
    """From text to a checkpoint with its tokenizer, which encodes as it did for training."""
    lines = [json.dumps({"text": f"line {i}: the square is {i * i}"}) for i in range(500)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    prefix = str(tmp_path / "data")
    options = {"train_tokenizer": True, "vocab_size": 290, "append_eod": True, "workers": 1}
    tokenize(TokenizeConfig((str(tmp_path / "text.jsonl"),), prefix, **options))
    import_checkpoint(checkpoint, tmp_path / "imported")
    (tmp_path / "imported" / "huggingface" / "tokenizer.json").unlink()
    monkeypatch.chdir(tmp_path)
    runs.run("data", "run", "--init", "imported", "--steps", "2", "--policy", "bf16", "--lr", "1e-3")
    monkeypatch.chdir("/")
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    eod = IndexedDataset(prefix)[0][-1]
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text())["eos_token_id"] == eod
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| Policy | bf16 |" in card
    assert "--policy bf16 --data" in card
    kept = tmp_path / "data.tokenizer.json"
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == kept.read_bytes()
    other = json.loads(kept.read_text())
    other["model"]["vocab"] |= {"another": 290}
    moved = kept.rename(tmp_path / "moved")
    kept.write_text(json.dumps(other))
    with pytest.raises(ValueError, match=r"data.tokenizer.json has other tokens than those that .*run was"):
        export_checkpoint(tmp_path / "run", tmp_path / "other")
    assert not (tmp_path / "other").exists()
    kept.unlink()
    export_checkpoint(tmp_path / "run", tmp_path / "without")
    assert f"no tokenizer is exported: it must lie at {kept} or " in capsys.readouterr().err
    moved.rename(kept)
    transformers = pytest.importorskip("transformers")
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == eod
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    first = IndexedDataset(prefix)[0]
    assert tokenizer("line 0: the square is 0")["input_ids"] == list(first[:-1])
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == first[-1]


def test_beginning_with_another_model_is_refused(checkpoint, llama2, text, tmp_path):
    import_checkpoint(checkpoint, tmp_path / "imported")
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copyfile(tmp_path / "imported" / "config.json", empty / "config.json")
    init = ["--init", str(tmp_path / "imported")]
    with pytest.raises(SystemExit, match=r"without --data .*tokenize .*huggingface/tokenizer\.json"):
        training_program.train(parse([*runs.SMALL, *init, "--out", str(tmp_path / "run")]))
    with pytest.raises(SystemExit, match=r"--data .* is text, .* has its own tokenizer; tokenize it by"):
        runs.run(text, tmp_path / "run", *init)
    for data, message in [
        (None, "without --eval-data Python's source is read as bytes, and .* has its own"),
        (str(text), "is text, .* its own"),
    ]:
        with pytest.raises(ValueError, match=message):
            evaluation_program.evaluate(evaluation_program.EvalConfig(tmp_path / "imported", data=data))
    (tmp_path / "imported" / "huggingface" / "tokenizer.json").unlink()
    for flags, message in [
        ([*init, "--model", "60m"], "leave out --model"),
        ([*init, "--vocab-size", "301"], "holds other with 300 tokens"),
        (["--init", str(llama2)], "text is read as 257 ids, .* and the model has 64; raise"),
        (["--init", str(tmp_path)], "holds no run"),
        (["--init", str(empty)], "has no checkpoint to begin with"),
        (["--init", str(checkpoint)], r"a Hugging Face checkpoint; import it first: python -m .* import /"),
        (init, r"--lr 0\.004, the default, is for training from scratch"),
    ]:
        with pytest.raises(SystemExit, match=message):
            runs.run(text, tmp_path / "run", *flags)
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_an_import_and_an_export_end_with_a_summary_and_the_next_command(
    tmp_path, monkeypatch, capsys, has_tokenizer
):
    def lines(*words):
        monkeypatch.setattr(sys, "argv", ["__main__.py", *map(str, words)])
        huggingface_program.main()
        return capsys.readouterr().out.splitlines()

    source, imported, out = (
        shutil.copytree(GOLDEN / "llama2", tmp_path / "in"),
        tmp_path / "a b",
        tmp_path / "out",
    )
    if has_tokenizer:
        (source / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    summary, then = lines("import", source, imported)
    sizes = "LlamaForCausalLM with 24,736 parameters, 2 blocks of width 32 and 64 tokens"
    assert summary == f"imported {sizes} as {imported}"
    config = parse(shlex.split(then.rpartition("train it: python train.py ")[2]))
    assert (config.init, config.optimizer.lr) == (imported, 2e-5)
    check_rate(parse(["--init", str(imported), "--lr", "0.004"]), out, {})  # named, the default is a choice
    tokenizer = f"--tokenizer '{imported}/huggingface/tokenizer.json'"
    command = f"python -m training.tokenize --input FILES {tokenizer} --output PREFIX --append-eod"
    assert (command in then) == has_tokenizer
    summary, then = lines("export", imported, out, "--quantize", "mxfp4")
    assert summary.startswith(f"exported step 0 as {out}: {sizes}; no Fprop of the run rounds")
    load = f"load it: transformers.AutoModelForCausalLM.from_pretrained('{out}')"
    assert then == (f"serve it: vllm serve {out}" if has_tokenizer else load)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_import_leaves_nothing(checkpoint, tmp_path, monkeypatch, capfd, number):
    def interrupted(*_):
        os.kill(os.getpid(), number)
        time.sleep(10)

    handler = signal.getsignal(number)
    monkeypatch.setattr(importing, "save_params", interrupted)
    monkeypatch.setattr(sys, "argv", ["__main__.py", "import", str(checkpoint), str(tmp_path / "run")])
    with pytest.raises(SystemExit) as ended:
        huggingface_program.main()
    assert ended.value.code == 128 + number
    assert capfd.readouterr().err.endswith(": interrupted\n")
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(number) is handler


@pytest.mark.parametrize(("weights", "loss"), [(None, "2.5000"), ("ema", "2.2500")])
def test_the_card_has_the_loss_of_the_exported_weights_and_the_run_s_command(tmp_path, weights, loss):
    flags = ["--ema", "0.9", "--set", "wgrad.rhs.rounding=stochastic", "--set", "fprop.*.scale_rule=even"]
    config = parse([*flags, "--policy", "wgrad"])
    evaluated = {"step": 7, "eval_loss": 2.5, "ema_eval_loss": 2.25}, {"step": 9, "eval_loss": 1}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evaluated))
    saved = {"config": to_json(config), "model": to_dict(get_config("tiny"))}
    assert "Commit" not in model_card(tmp_path, saved, 8, "not quantized", weights)
    saved["environment"] = {"commit": "0123456789abcdef-dirty"}
    card = model_card(tmp_path, saved, 8, "not quantized", weights)
    assert f"| Validation loss before export | {loss} at step 7 |" in card
    assert "| Commit | 0123456789abcdef-dirty |" in card
    assert ("| average over the steps (--ema 0.9), not quantized |" in card) == (weights == "ema")
    command = next(line for line in card.splitlines() if line.startswith("| Command")).split("`")[1]
    parsed = parse(shlex.split(command)[2:])
    assert dataclasses.replace(parsed, out=None) == config
