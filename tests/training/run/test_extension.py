"""Extension of a run by --resume --steps: equal to a longer run, or refused with the reason."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from support.runs import SMALL, STOCHASTIC, lines, weights

import train as training_program
from models import decoder
from models.configs import get_config, to_dict
from training.command_line import parse
from training.config import Config, DataConfig, MLPerfConfig, OptimizerConfig, PrecisionConfig
from training.data.indexed_dataset import IndexedWriter
from training.data.megatron import load_megatron
from training.phases import Phase, phases_of, to_record
from training.run.record import to_json, write_run_config
from training.run.resume import check_extension, check_order, extend_phases
from training.run.setup import choose

CONSTANT = OptimizerConfig(min_lr_ratio=1.0)


def run(*flags):
    return training_program.train(parse([str(flag) for flag in flags]))


def final(out):
    return {r["step"]: r["loss"] for r in lines(out) if "loss" in r}, weights(out)[1]


@pytest.mark.slow
def test_an_extended_run_equals_a_longer_one_of_the_same_cosine(text, tmp_path):
    flags = "--policy", "bf16", "--batch-size", 2, "--seq-len", 16, "--eval-batches", 1, "--warmup-steps", 1
    flags = (*flags, "--data", text, "--out")
    run(*flags, tmp_path / "whole", "--steps", 5, "--decay", 2)
    run(*flags, tmp_path / "run", "--steps", 3)
    run("--resume", "--out", tmp_path / "run", "--steps", 5)
    jax.tree.map(np.testing.assert_array_equal, final(tmp_path / "run"), final(tmp_path / "whole"))
    assert json.loads((tmp_path / "run" / "config.json").read_text())["config"]["steps"] == 5
    with pytest.raises(SystemExit, match="--steps: the run has 5, the command line 4"):
        run("--resume", "--out", tmp_path / "run", "--steps", 4)
    with pytest.raises(SystemExit, match="--decay 3: the run has --decay 2, on which its learning rate"):
        run("--resume", "--out", tmp_path / "run", "--decay", 3)


@pytest.mark.slow
def test_a_branch_that_decays_equals_a_run_that_does(text, tmp_path):
    """With AdamW's moments and random bits in all three GEMMs; also where the branch itself is resumed."""
    flags = (*SMALL, *STOCHASTIC, "--warmup-steps", 1, "--data", text, "--out")
    run(*flags, tmp_path / "whole", "--steps", 5, "--schedule", "wsd", "--decay", 3)
    run(*flags, tmp_path / "stable", "--steps", 3, "--schedule", "constant", "--checkpoint-every", 1)
    origin, out = tmp_path / "stable" / "checkpoints" / "2", tmp_path / "branch"
    run("--branch", origin, "--decay", 3, "--out", out, "--stop-after", 3)
    run("--resume", "--out", out)
    (losses, state), (expected, whole) = final(out), final(tmp_path / "whole")
    assert losses == {step: loss for step, loss in expected.items() if step > 2}
    jax.tree.map(np.testing.assert_array_equal, state, whole)
    for rest, said in (
        (["--decay", 3, "--lr", 1], "--branch goes on with the flags of .*\n  --lr: the run has 0.004"),
        (["--steps", 2], "has taken 2 of --steps 2; add --decay N or more --steps"),
    ):
        with pytest.raises(SystemExit, match=said):
            run("--branch", origin, "--out", tmp_path / "no", *rest)
    with pytest.raises(ValueError, match=r"no such checkpoint in .*stable; there are \[2, 3\]"):
        parse(["--branch", str(origin.with_name("1")), "--out", "no"])
    assert not (tmp_path / "no").exists()


def test_a_learning_rate_that_would_have_been_another_is_named():
    short = Config(steps=100)
    check_extension(dataclasses.replace(short, steps=200), short, taken=31)  # all of them warm-up
    said = r"at step 32 it was 0\.00399818752 and would have been 0\.00399969265; .*--init"
    with pytest.raises(ValueError, match=said):
        check_extension(dataclasses.replace(short, steps=200), short, taken=32)
    short = Config(steps=100, optimizer=CONSTANT)
    check_extension(dataclasses.replace(short, steps=200), short, taken=100)
    wsd = dataclasses.replace(short, optimizer=OptimizerConfig(schedule="wsd", decay=20, lr=4e-3))
    stable = dataclasses.replace(wsd, optimizer=OptimizerConfig(schedule="constant"))
    check_extension(wsd, stable, taken=81)  # rates are those of updates 0 to 80
    with pytest.raises(ValueError, match=r"--schedule wsd: the run has --schedule constant, .* at step 82"):
        check_extension(wsd, stable, taken=82)
    with pytest.raises(ValueError, match=r"go on from step 80, where its decay begins, .* --steps N, or"):
        check_extension(dataclasses.replace(wsd, steps=200), wsd, taken=100)
    logged = dataclasses.replace(short, mlperf=MLPerfConfig(mllog=True))
    with pytest.raises(ValueError, match="which its MLPerf log names"):
        check_extension(dataclasses.replace(logged, steps=200), logged, taken=0)


def test_switches_between_policies_move_only_ahead_of_the_run():
    config = Config(steps=200, policy="wgrad; fp8 from 0.82", optimizer=CONSTANT)
    phases = Phase(1, "wgrad", None), Phase(83, "fp8", None)
    moved = extend_phases(phases, config, taken=82)
    assert [phase.first_step for phase in moved] == [1, 165]
    with pytest.raises(ValueError, match="fp8 would begin at step 165, and the run, now at step 83, has it"):
        extend_phases(phases, config, taken=83)
    fixed = dataclasses.replace(config, precision=PrecisionConfig("wgrad; fp8 from 83"))
    assert extend_phases(phases, fixed, taken=100) == phases


def test_phases_keep_their_order_in_a_longer_run():
    config = Config(steps=200, policy="bf16; fp8 from 0.5; wgrad from 120", optimizer=CONSTANT)
    phases = Phase(1, "bf16", None), Phase(51, "fp8", None), Phase(120, "wgrad", None)
    assert extend_phases(phases, config, taken=40)[1].first_step == 101
    longer = dataclasses.replace(config, steps=300)
    with pytest.raises(ValueError, match="would begin at steps 1, 151, 120, out of order"):
        extend_phases(phases, longer, taken=40)


def test_an_order_that_depends_on_the_length_is_refused(tmp_path):
    prefix = str(tmp_path / "data")
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(20):
            writer.add(np.arange(50))  # 95 % of them are 950 tokens: 59 samples an epoch
    data = DataConfig(data=(prefix,), vocab_size=64, batch_size=1, seq_len=16)
    corpus = load_megatron(data, 64)
    runs = {steps: Config(data=data, steps=steps) for steps in (40, 59, 60)}
    check_order(corpus, runs[59], runs[40])
    with pytest.raises(ValueError, match="in the order for 1 epoch, and would be in that for 2 epochs with"):
        check_order(corpus, runs[60], runs[59])


def begin(folder, *flags):
    """Writes the config.json of a run with a checkpoint of step 100; returns it without its configuration."""
    config, model = parse([*flags]), get_config("tiny")
    phases = phases_of(config.precision, config.steps, functools.partial(decoder.layer_policies, model))
    facts = {"source": "", "train_tokens": 9, "validation_tokens": 9, "crc32": ""}
    record = {"model": to_dict(model), "data": facts} | to_record(phases)
    (folder / "checkpoints" / "100").mkdir(parents=True)
    write_run_config(folder, record | {"config": to_json(config)})
    return record


def test_a_cosine_keeps_its_length_in_a_longer_run_and_in_a_longer_branch(tmp_path):
    begin(tmp_path / "run", "--steps", "300", "--warmup-steps", "20")
    for flags in (["--resume", "--out", f"{tmp_path}/run"], ["--branch", f"{tmp_path}/run", "--out", "new"]):
        config, *_ = choose(parse([*flags, "--steps", "400"]), tmp_path / "run")
        assert (config.steps, config.optimizer.decay) == (400, 280)
        assert choose(parse(flags), tmp_path / "run")[0].optimizer.decay is None


def test_a_branch_of_a_run_stays_at_its_checkpoint_while_that_run_goes_on(tmp_path):
    """Also where it is resumed before it has a checkpoint of its own; devices are what there are."""
    origin, out = tmp_path / "run", tmp_path / "branch"
    changed = "--set", "wgrad.rhs.rounding=stochastic"
    record = begin(
        origin, "--policy", "wgrad; fp8 from 0.82", *changed, "--devices", "3", "--schedule", "constant"
    )
    config, *_ = choose(parse(["--branch", str(origin), "--out", str(out), *changed]), out)
    assert config.branch == origin / "checkpoints" / "100"
    assert config.devices is None
    out.mkdir()
    write_run_config(out, record | {"config": to_json(config)})
    (origin / "checkpoints" / "200").mkdir()
    for flags in ([], ["--branch", str(origin)]):
        resumed, *_ = choose(parse(["--resume", "--out", str(out), *flags]), out)
        assert resumed.branch == config.branch
    with pytest.raises(ValueError, match=r"--branch: the run has .*/100, the command line .*/200"):
        choose(parse(["--resume", "--out", str(out), "--branch", f"{origin}/checkpoints/200"]), out)
