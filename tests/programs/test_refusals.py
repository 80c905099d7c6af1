"""Command lines that cannot work: refused in one line before anything is computed or written."""

import json
import pathlib
import shlex
import shutil
import sys

import pytest
from support.marks import parametrize
from support.runs import error_of, resume, run

import eval as evaluation_program
import train as training_program
from analysis.compare.compare import CompareConfig
from analysis.diagnose.diagnose import DiagnoseConfig
from analysis.evaluate import EvalConfig
from analysis.sample import SampleConfig
from training.command_line import FlagError, check_lists, flags_of, in_one_line, parse
from training.config import Config, DataConfig, by_flag
from training.flags.names import SYNONYMS
from training.huggingface import __main__ as huggingface
from training.run.checksums import check_saveable
from training.run.record import read_run_config, write_run_config
from training.run.setup import check_apart
from training.tokenize import tokenize as tokenization
from training.tokenize.plan import TokenizeConfig

NO_NUMBERS = """
--lr=nan --lr=inf --lr=1e39 --lr=1e-46 --lr=-1 --clip=0 --clip=nan --clip=-1 --clip=1e-320 --clip=1e39 --b1=1
--b1=-0.1 --b1=nan --b2=1 --b2=0.9999999999 --eps=-1 --eps=nan --weight-decay=-1 --weight-decay=inf
--min-lr-ratio=2 --min-lr-ratio=nan --steps=10000000000000000000 --steps=-1 --vocab-size=1000000000000
--batch-size=-1 --seq-len=2147483648 --seed=-1 --seed=4294967296 --target-loss=nan --spike-factor=nan
--warmup-steps=2147483648 --accumulate=0 --stats-every=0 --unroll=0
"""
SHAPE = {"d_model": 8, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "head_dim": 4, "d_ff": 8}


@pytest.mark.parametrize(
    ("shape", "flags", "said"),
    [
        ({"n_layers": 2**31}, "", "n_layers must be a positive integer below 2**31"),
        ({"n_layers": 2**31 - 1}, "", "n_layers must be at most 10,000, got 2,147,483,647"),
        ({"d_model": 2**31 - 1}, "", "GiB a device with their moments"),
        ({"d_ff": 2**31 - 1}, "", "GiB a device with their moments"),
        ({"n_heads": 2**31 - 1}, "", "GiB a device with their moments"),
        ({"vocab_size": 2**31}, "", "vocab_size must be a positive integer below 2**31"),
        ({}, "--batch-size 1000000000", "--batch-size 1000000000 and --seq-len 128 need at least"),
        ({}, "--batch-size 1000000000 --accumulate 1000000000", "need at least"),
        ({}, "--seq-len 2147483647", "need at least"),
        ({}, "--vocab-size 2147483647 --model llama3.1-405b", "smaller --model or --vocab-size"),
    ],
)
def test_a_model_or_batch_that_no_device_holds_is_refused(text, tmp_path, shape, flags, said):
    if shape:
        (tmp_path / "shape.json").write_text(json.dumps({"vocab_size": 257} | SHAPE | shape))
        flags = f"--model-config {tmp_path / 'shape.json'}"
    assert said in error_of("--data", text, "--out", tmp_path / "run", *flags.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--lrx 3", "Unrecognized options: --lrx, 3; did you mean --lr?; see"),
        ("--stps 1 --oot x", "Unrecognized options: --stps, 1, --oot, x; did you mean --"),
        ("--polcy=bf16 --sed=a=b", "options: --polcy=bf16, --sed=a=b; did you mean --"),
        ("--lerning-rate=1e-3 --fp8", "; did you mean --lr for --lerning-rate, --policy fp8 for --fp8?"),
        ("--esp 1 --dodel tiny", "did you mean --eps for --esp, --model for --dodel?"),
        ("per_device_batch_size=4", "; did you mean --batch-size?; see"),
        ("--context_parallel_size 2", "; did you mean --mesh context=N?; see"),
        ("-lr 1 true", "; did you mean --lr?; see"),
        ("--help=3", "Unrecognized options: --help=3; did you mean --help?; see"),
        ("--zzzzz=3", "Unrecognized options: --zzzzz=3; see"),
        ("--tensorboard=true", "Unrecognized options: true; --tensorboard takes no value; see"),
        ("--tensorboard true --lr 1", "Unrecognized options: true; --tensorboard takes no value; see"),
        ("--resume a --decay 4 --out b", "--resume takes no value: --resume --out RUN continues a run"),
        ("--steps 1 true", "Unrecognized options: true; see"),
        ("--steps 1.5", "Error parsing --steps: invalid literal for int() with base 10: '1.5'; see"),
        ("--remat x", "Expected one of ('none', 'dots', 'fp4', 'full'); see"),
        ("--warmup-steps 2147483647", "--warmup-steps must be at least 0 and less than 2**31 - 1, got"),
        ("--policy", "Missing value for argument '--policy'"),
        ("--layers a=fp8 --lr 1 --layers b=fp8", "--layers is given 2 times; write all its values after one"),
        ("--data a --data=b", "--data is given 2 times"),
        ("--eval-data a --eval_data=b", "--eval-data is given 2 times; write all its values after one"),
        ("--mesh data=2 --mesh tensor=2", "--mesh is given 2 times; it takes one value; see"),
        ("--submission-org acme", "--submission-org acme is for MLPerf's log: add --mllog, or leave it out"),
        ("--submission-division open", "--submission-division open is for MLPerf's log: add --mllog"),
        (
            "--preset mlperf-llama3.1-8b --eval-batches 5",
            "--eval-sequences 1024 replaces --eval-batches 5: give one of them, for batches beside a preset "
            "--eval-sequences None; see",
        ),
        ("--restart-positions --document-mask off", "within documents: leave out --document-mask off; see"),
        ("--data ~nobody_such/x", "~nobody_such/x: there is no such user; write ./~nobody_such/x"),
        ("--stats-every 301", "--stats-every 301 measures nothing in --steps 300; lower it; see"),
        ("--target-loss -1", "--target-loss must be a positive float32, got -1.0; see"),
        ("--z-loss 1e-320", "--z-loss must be 0, or a positive float32 up to 1, got 1e-320; see"),
        ("--z-loss 3e38", "--z-loss must be 0, or a positive float32 up to 1, got 3e+38; see"),
        ("--set a.b=1 *.c=2 --lr 1", "--set takes one change; write --set before '*.c=2' too; see"),
        ("--stop-after 0", "--stop-after must be from 1 to --steps 300"),
        ("--stop-after 301", "--stop-after must be from 1 to --steps 300"),
        ("--data=", "got an empty name"),
        ("--data a ''", "got an empty name"),
        ("--eval-data=", "got an empty name"),
        ("--resume", "--out"),
        ("--model-config a.json --model 60m", "--model and --model-config both name the model"),
        ("--preset mlperf", "mlperf"),
        ("--preset mlperf-llama3.1-8b --batch-size x", "'x'"),
        ("--preset mlperf-llama3.1-8b --batch", "--batch"),
        *((flag, f"{flag.partition('=')[0]} must be ") for flag in NO_NUMBERS.split()),
    ],
)
def test_wrong_flags_are_one_line(flags, said, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(shlex.split(flags))
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert errors.count("\n") == 1
    assert errors.endswith("--help\n")


@pytest.mark.parametrize(
    ("config", "flag"),
    [
        *((Config, flag) for flag in ("--data", "--eval-data", "--layers")),
        *((DiagnoseConfig, flag) for flag in ("--data", "--eval-data", "--layers")),
        (SampleConfig, "--layers"),
        (CompareConfig, "--plot"),
        (TokenizeConfig, "--input"),
    ],
)
def test_no_list_is_taken_by_its_last_part_alone(config, flag):
    with pytest.raises(FlagError) as refused:
        flags_of(config, [flag, "a", f"{flag}=b"])
    assert refused.value.message.startswith(f"{flag} is given 2 times; ")


@pytest.mark.parametrize(
    ("program", "words", "meant"),
    [
        (evaluation_program.main, "runs/any --polcy=bf16", "--policy"),
        (evaluation_program.main, "runs/any --polcy bf16", "--policy"),
        (evaluation_program.main, "runs/any --fp8", "--policy fp8"),
        (evaluation_program.main, "diagnose runs/any --output-dir x", "--out"),
        (tokenization.main, "--input a --output-prefix b", "--output"),  # which is missing
        (tokenization.main, "--input a --output b --json-keys c", "--field"),
        (huggingface.main, "export a b --format mxfp4", "--quantize mxfp4"),
    ],
)
def test_each_program_suggests_its_own_flags(program, words, meant, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program", *words.split()])
    with pytest.raises(SystemExit):
        program() if program is huggingface.main else program(words.split())
    assert f"; did you mean {meant}?; see" in capsys.readouterr().err


def test_data_to_calibrate_on_is_not_taken_by_its_last_part_alone(capsys, monkeypatch):
    flags = ["--calibrate", "a", "--calibrate=b"]
    monkeypatch.setattr(sys, "argv", ["program", "export", "run", "out", *flags])
    with pytest.raises(FlagError):
        huggingface.main()
    said = "--calibrate is given 2 times; it takes one value; see python -m training.huggingface --help\n"
    assert capsys.readouterr().err.endswith(said)


def test_synonyms_name_flags_that_a_program_has():
    flags = {
        f"--{name.replace('_', '-')}"
        for each in (Config(), TokenizeConfig(("a",), "b"))
        for name in by_flag(each)
    } | {"--quantize"}
    assert {ours.split()[0] for meant in SYNONYMS.values() for ours in meant} <= flags


def test_a_folder_after_a_change_may_have_an_equals_sign():
    check_lists(EvalConfig, ["--set", "wgrad.*.scale_rule=even", "lr=3e-4"])
    check_lists(EvalConfig, ["--set", "wgrad.*.scale_rule=even", "runs/lr=3e-4"])


def test_boxes_in_other_encodings_and_colors_are_one_line():
    lines = ("Title", "-----", " No flag: --lrx", " -----", " Perhaps you meant:", "     --lr FLOAT")
    assert in_one_line("".join(f" {line:40}\n" for line in lines)) == "No flag: --lrx; did you mean --lr?"
    color = "╭─ Title ─╮\n│ \x1b[1mno such\x1b[0m  │\n│ flag.   │\n╰─────────╯\n"
    assert in_one_line(color) == "no such flag"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise BaseException('no')", "own.py raises BaseException: no; all of it is run"),
        ("raise KeyboardInterrupt", "own.py raises KeyboardInterrupt: "),
        ("raise SystemExit(0)", "own.py raises SystemExit: 0"),
        ("class E(Exception):\n    def __str__(self): raise OSError\nraise E", "own.py raises E: "),
        ("import runpy\nrunpy.run_path(__file__)", "own.py raises RecursionError: maximum recursion"),
        ("policy = 3", "own.py has no mxjax.Policy called policy, policy is of type int; it has none"),
        ("late = 'fp8'\nnote = 'fp9'", "own.py has no mxjax.Policy called policy; it has late"),
        ("def policy(): pass", "of type function (give a name to what it returns: own = policy())"),
        ("policy: = 3", "own.py raises SyntaxError: invalid syntax"),
    ],
)
def test_a_policy_file_that_does_anything_else_is_one_line(text, tmp_path, code, said):
    (tmp_path / "own.py").write_text(code)
    policy = f"{tmp_path / 'own.py'}:policy"
    assert said in error_of("--data", text, "--out", tmp_path / "run", "--policy", policy)
    assert not (tmp_path / "run").exists()


def test_a_run_inside_its_text_or_another_run_is_refused(text, tmp_path):
    """Its records would become text of the next start, or be set aside as a damaged checkpoint."""
    (tmp_path / "texts").mkdir()
    shutil.copy(text, tmp_path / "texts")
    inside = tmp_path / "texts" / "run"
    for flags in (["--data", tmp_path / "texts"], ["--data", text, "--eval-data", tmp_path / "texts"]):
        said = error_of(*flags, "--out", inside)
        assert f"--out {inside} lies in {flags[-2]} {tmp_path / 'texts'}, so that the run would" in said
    assert not inside.exists()
    write_run_config(tmp_path, {})
    inside = tmp_path / "checkpoints" / "7"
    assert f"--out {inside} lies among the checkpoints of a run" in error_of("--data", text, "--out", inside)
    assert not inside.exists()
    check_apart(DataConfig((str(tmp_path / "texts"),)), tmp_path / "texts" / ".runs" / "run")  # not read


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("gs:", "a-gs:/b", "s3:/bucket/run"), "name a folder, no bucket, gs: or s3:"),
        (("a\nb", "a\x1b[31m"), "name a path without control characters"),
        (("\udcff",), "name a path in UTF-8, or set PYTHONUTF8=1"),
        (("a[1]/run",), "a[1]/run: name a path without [ ]"),
    ],
)
def test_a_folder_where_checkpoints_cannot_be_saved_is_refused(text, tmp_path, names, said):
    for name in names:
        assert said in error_of("--data", text, "--out", tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_current_folder_that_was_removed_is_named(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "the current folder was removed. Change to another" in error_of("--steps", "1")


def test_other_scripts_are_names_like_any():
    check_saveable(pathlib.Path("runs/\u3000\u200d\u00a0é"))


@parametrize(
    "flags",
    slow=[
        ["--policy", "primus_deosc", "--layers", "blocks[1].mlp.down=primus_turbo"],
        ["--policy", "wgrad", "--set", "wgrad.*.scale_rule=even"],
    ],
)
def test_the_command_of_a_run_resumes_it_when_repeated(text, tmp_path, monkeypatch, flags, capsys):
    monkeypatch.setattr(training_program, "take_steps", lambda *_: {})
    run(text, tmp_path / "run", *flags)
    late = "warning: --deoscillate 3:200:1500 has no effect with --steps 6"
    assert capsys.readouterr().out.count(late) == ("primus_deosc" in flags)
    begun = read_run_config(tmp_path / "run")
    run(text, tmp_path / "run", *flags, "--resume")
    resumed = read_run_config(tmp_path / "run")
    assert resumed["phases"] == begun["phases"]
    assert resumed["config"]["precision"] == begun["config"]["precision"]


def test_a_run_executes_no_file_that_it_names(text, tmp_path, monkeypatch, capsys):
    """Who sends a run may change the file, and leave out the record that makes it unnecessary."""
    monkeypatch.setattr(training_program, "take_steps", lambda *_: {})
    own, out, executed = tmp_path / "own.py", tmp_path / "run", tmp_path / "executed"
    own.write_text("own = 'fp8'")
    run(text, out, "--policy", f"{own}:own")
    own.write_text(f"open({str(executed)!r}, 'w')\nown = 'bf16'")
    resume(out)
    assert "own.py changed since the run began, which keeps its policies on record" in capsys.readouterr().out
    saved = read_run_config(out)
    del saved["phases"]
    write_run_config(out, saved)
    for program, words in (
        (training_program.main, ("--resume", "--out", out)),
        (evaluation_program.main, (out,)),
    ):
        assert "config.json holds no policies of this version" in error_of(*words, program=program)
    assert not executed.exists()


@pytest.mark.parametrize("size", [0, 2, 31])
def test_a_text_too_short_to_evaluate_on_is_named(tmp_path, size):
    (tmp_path / "tiny.txt").write_bytes(b"a" * size)
    flags = ["--data", tmp_path / "tiny.txt", "--out", tmp_path / "run", "--seq-len", "16"]
    tokens = size + (size > 0)  # and the end of the document
    assert f"tiny.txt has {tokens} tokens, and --seq-len + 1 = 17 are needed to train on" in error_of(*flags)
    assert not (tmp_path / "run").exists()


def test_a_command_of_eval_that_is_misspelled_is_named(capsys):
    with pytest.raises(SystemExit) as ended:
        evaluation_program.main(["dianose", "run"])
    assert ended.value.code == 2
    said = "eval.py: error: dianose is no run; did you mean eval.py diagnose?\n"
    assert capsys.readouterr().err == said


def test_help_that_nobody_can_read_is_one_line(monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert "error: standard output: [Errno 28]" in error_of("--help", program=parse)
