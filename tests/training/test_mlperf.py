"""MLPerf's llama31_8b: the preset, its log by mlperf_logging's own checker, and its published points."""

import dataclasses
import json
import os
import pathlib
import signal
import time

import numpy as np
import pytest
from support.marks import parametrize
from support.runs import lines

import mxjax
import train as training_program
from models.configs import get_config
from models.decoder import layer_policies
from mxjax.policy.layers import LayerPolicies
from training.command_line import parse
from training.config import Config, MLPerfConfig
from training.data.indexed_dataset import IndexedWriter
from training.flags import mlperf
from training.log.mlperf import TOKEN, MLPerfLog, settings
from training.log.reporter import RunLog
from training.memory import ONE_DEVICE
from training.optimizer.schedule import learning_rate
from training.run.record import from_json, to_json

checker = pytest.importorskip("mlperf_logging.compliance_checker.mlp_compliance")
PRESET = ["--preset", "mlperf-llama3.1-8b"]
RULES = "6.1.0"


def failures(path):
    """The keys whose rules a log breaks, by mlperf_logging; "" for what it reports of no key."""
    found = checker.make_checker("training", RULES, quiet=False, werror=False)
    found.check_file(str(path), f"training_{RULES}/common.yaml")
    return set(found.overwritable) | set(found.warnings) | ({""} if found.not_overwritable else set())


def events(path):
    return [json.loads(line.removeprefix(TOKEN)) for line in path.read_text().splitlines()]


def policies_of(config):
    return layer_policies(
        get_config(config.model), mxjax.get_policy(config.precision.policy), config.precision.rules()
    )


def write_log(path, config, losses):
    """A log as train.py writes it, of a run with these losses by sequences; the last ends it."""
    with MLPerfLog(
        path, settings(config, policies_of(config), 1024, "cpu", ONE_DEVICE), 0, time.time()
    ) as log:
        for sequences, loss in losses.items():
            log.evaluation_starts(sequences)
            log.evaluation_ends(sequences, loss, last=sequences == max(losses))
        log.run_ends(max(losses), success=loss <= mlperf.TARGET_LOSS)


def test_the_preset_is_the_benchmark():
    config = parse(PRESET)
    model = get_config(config.model)
    assert (model.vocab_size, config.data.vocab_size) == (128_256, 128_256)
    found = (model.d_model, model.n_layers, model.n_heads, model.n_kv_heads, model.d_ff)
    assert found == (4096, 32, 32, 8, 14_336)
    assert (config.data.batch_size, config.data.seq_len) == (32, 8192)
    assert (config.eval_every * 32, config.eval_sequences, config.target_loss) == (12_288, 1024, 3.3)
    rate = learning_rate(config.optimizer, config.steps, np)
    np.testing.assert_allclose([rate(s) for s in (0, 128, 1_200_000)], [8e-4 / 129, 8e-4, 8e-5])
    o = config.optimizer
    assert (o.b1, o.b2, o.eps, o.weight_decay, o.clip) == (0.9, 0.95, 1e-5, 0.1, 1.0)
    assert from_json(to_json(config)) == config


def test_every_value_of_the_preset_can_be_overridden():
    flags = ["--model", "tiny", "--seq-len=64", "--steps", "9", "--lr", "1e-2", "--eval-every=2"]
    more = ["--target-loss", "4", "--eval-sequences", "7", "--no-mllog", "--remat=none", "--warmup-steps=1"]
    config = parse([*flags, *PRESET, *more, "--b2", "0.9", "--vocab-size", "300", "--policy", "fp8"])
    assert config == dataclasses.replace(
        parse(PRESET),
        model="tiny",
        steps=9,
        eval_every=2,
        target_loss=4.0,
        eval_sequences=7,
        remat="none",
        mlperf=MLPerfConfig(),
        policy="fp8",
        data=dataclasses.replace(parse(PRESET).data, seq_len=64, vocab_size=300),
        optimizer=dataclasses.replace(parse(PRESET).optimizer, lr=1e-2, warmup_steps=1, b2=0.9),
    )


@pytest.mark.parametrize(
    ("batch_size", "lr", "warmup_steps", "eval_every"),
    [
        (16, 4e-4, 16, 768),
        (64, 8e-4, 96, 192),
        (96, 1e-3, 170, 128),
        (128, 2e-3, 256, 96),
        (8, 8e-4, 512, 1536),
    ],
)
def test_the_preset_follows_the_batch_size(batch_size, lr, warmup_steps, eval_every):
    config = parse([*PRESET, f"--batch-size={batch_size}"])
    assert config.data.batch_size == batch_size
    assert (config.optimizer.lr, config.optimizer.warmup_steps) == (lr, warmup_steps)
    assert config.eval_every == eval_every


@pytest.mark.parametrize("policy", ["bf16", "fp8", "wgrad_hadamard"])
def test_the_log_passes_the_compliance_checker(tmp_path, policy):
    path = tmp_path / "mllog.txt"
    write_log(path, parse([*PRESET, "--policy", policy]), {12_288: 5.6, 172_032: 3.29})
    assert failures(path) == set()
    found = {event["key"]: event["value"] for event in events(path)}
    names = {"bf16": "bfloat16", "fp8": "fp8", "wgrad_hadamard": "mxfp4"}
    assert found["lowest_numerical_precision_in_linear"] == names[policy]
    assert found["lowest_numerical_precision_in_attn"] == "bfloat16"
    assert found["train_samples"] == 172_032


def test_the_log_says_how_a_mesh_shares_the_work():
    config = parse([*PRESET, "--accumulate", "2"])
    found = settings(
        config, policies_of(config), 1024, "cpu", ONE_DEVICE | {"data": 2, "fsdp": 4, "tensor": 8}
    )
    assert (found["tensor_parallelism"], found["pipeline_parallelism"]) == (8, 1)
    parts = found["micro_batch_size"] * found["gradient_accumulation_steps"] * 2 * 4
    assert parts == found["global_batch_size"] == 32


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (["--seq-len", "4096"], "max_sequence_length"),
        (["--steps", "1000"], "max_steps"),
        (["--eps", "1e-8"], "opt_adamw_epsilon"),
        (["--clip", "2"], "opt_gradient_clip_norm"),
    ],
)
def test_the_checker_sees_what_a_run_changes(tmp_path, flags, key):
    write_log(tmp_path / "mllog.txt", parse([*PRESET, *flags]), {12_288: 3.2})
    assert key in failures(tmp_path / "mllog.txt")


def test_the_checker_sees_a_target_not_reached(tmp_path):
    write_log(tmp_path / "mllog.txt", parse(PRESET), {12_288: 5.6})
    assert failures(tmp_path / "mllog.txt") == {""}
    assert events(tmp_path / "mllog.txt")[-2]["metadata"]["status"] == "aborted"


def test_a_resumed_log_goes_on_where_the_run_does(tmp_path):
    config = parse(PRESET)
    whole, path = tmp_path / "whole.txt", tmp_path / "mllog.txt"
    write_log(whole, config, {12_288: 5.6, 24_576: 4.4, 36_864: 3.2})
    facts = settings(config, policies_of(config), 1024, "cpu", ONE_DEVICE)
    with MLPerfLog(path, facts, 0, time.time()) as log:
        for sequences, loss in {12_288: 5.6, 24_576: 4.5}.items():  # the second will be forgotten
            log.evaluation_starts(sequences)
            log.evaluation_ends(sequences, loss, last=False)
    path.write_text(path.read_text()[:-5])  # cut off while it was written
    with MLPerfLog(path, facts, 12_288 + 320, time.time()) as log:
        for sequences, loss in {24_576: 4.4, 36_864: 3.2}.items():
            log.evaluation_starts(sequences)
            log.evaluation_ends(sequences, loss, last=loss < 3.3)
        log.run_ends(36_864, success=True)
    found, expected = ([e | {"time_ms": 0} for e in events(p)] for p in (path, whole))
    assert found == expected
    assert failures(path) == set()


def test_formats_that_mlperf_does_not_name_are_refused():
    policies = LayerPolicies(("head",), (mxjax.get_policy("chmiel_mx"),))
    with pytest.raises(ValueError, match="MLPerf has no name for mxfp4_e3m0"):
        settings(parse(PRESET), policies, 1024, "cpu", ONE_DEVICE)


def test_the_reference_points_are_mlperf_logging_s():
    path = pathlib.Path(checker.__file__).parents[1] / f"rcp_checker/training_{RULES}/rcps_llama31_8b.json"
    published = json.loads(path.read_text()).values()
    found = {r["BS"]: sorted(r["Epochs to converge"]) for r in published}
    assert found == {batch_size: list(r.sequences) for batch_size, r in mlperf.PUBLISHED_RUNS.items()}
    for r in published:
        ours = mlperf.PUBLISHED_RUNS[r["BS"]]
        assert ours.lr == r["Hyperparams"]["opt_base_learning_rate"]
        assert ours.warmup_sequences == r["Hyperparams"]["opt_learning_rate_warmup_samples"]
    assert round(mlperf.PUBLISHED_RUNS[32].mean_sequences) == 179_405


def generated(folder, kind):
    """Flags for generated data: a text, or datasets for training and evaluation in Megatron's format."""
    lines = [f"line {i}: the square is {i * i}\n" for i in range(40_000)]
    if kind == "text":
        (folder / "text.txt").write_text("".join(lines))
        return ["--data", str(folder / "text.txt")]
    for name, part in (("train", lines[:-2000]), ("validation", lines[-2000:])):
        with IndexedWriter(folder / name, np.uint16) as writer:
            for i in range(0, len(part), 20):  # the order of long documents is found faster
                writer.add(np.array([*"".join(part[i : i + 20]).encode(), 256]))
    return ["--data", str(folder / "train"), "--eval-data", str(folder / "validation")]


TINY = ["--model", "tiny", "--vocab-size", "257", "--seq-len", "32"]
SCALED_DOWN = [*TINY, "--lr", "5e-3", "--warmup-steps", "5"]


@parametrize("kind", slow=["tokenized"], exhaustive=["text"])
def test_a_scaled_down_run_passes_the_checker(tmp_path, kind):
    """The benchmark on generated text, with another model, sequence, rate and cadence; else its own."""
    out = tmp_path / "run"
    data = generated(tmp_path, kind)
    flags = [*PRESET, *SCALED_DOWN, "--eval-every", "6", *data, "--out", str(out)]
    with pytest.raises(SystemExit):  # so that resuming is shown too
        interrupt(training_program, parse(flags), after=4)
    evaluation = training_program.train(parse([*flags, "--resume"]))
    assert evaluation["eval_loss"] <= 3.3
    assert evaluation["eval_tokens"] == 1024 * 32
    assert failures(out / "mllog.txt") == {"max_sequence_length"}
    steps = lines(out)
    losses = {line["step"]: line["eval_loss"] for line in steps if "eval_loss" in line}
    assert all(loss > 3.3 for step, loss in losses.items() if step < max(losses))
    found = [e for e in events(out / "mllog.txt") if e["key"] == "eval_accuracy"]
    got = {e["metadata"]["samples_count"]: e["value"] for e in found}
    assert got == {32 * step: loss for step, loss in losses.items()}
    before = (out / "mllog.txt").read_bytes()
    assert training_program.train(parse([*flags, "--resume"])) == {}  # at its target, nothing is left to do
    assert (out / "mllog.txt").read_bytes() == before


def interrupt(program, config: Config, after: int):
    original = RunLog.step

    def step(self, number, *arguments):
        original(self, number, *arguments)
        if number == after:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunLog, "step", step)
        program.train(config)


def test_more_evaluation_sequences_than_there_are_is_an_error(tmp_path):
    (tmp_path / "text.txt").write_text("a short text " * 1000)
    flags = [*PRESET, *SCALED_DOWN, "--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "run")]
    with pytest.raises(SystemExit, match="--eval-sequences 1024 asks for more than the 20"):
        training_program.train(parse(flags))
    assert not (tmp_path / "run").exists()
