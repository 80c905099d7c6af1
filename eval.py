"""Evaluates a run's checkpoint, in its own precision or another: `python eval.py RUN --policy=bf16`.

`python eval.py compare RUN [RUN ...]` compares the evaluations of several runs.
`python eval.py diagnose RUN` measures the errors of every GEMM of one.
`python eval.py sample RUN --prompt TEXT` generates text.

All print text to read, or with --json one line of JSON.
"""

if __name__ == "__main__":
    try:
        from training.process.start import prepare_process, program_name
    except ImportError as error:  # of an extra that is not installed
        raise SystemExit(f"eval.py: error: {error}") from None

    prepare_process()  # before the other imports, which take seconds

import dataclasses
import difflib
import pathlib
import sys
from typing import Any

import numpy as np

from analysis.compare.compare import CompareConfig, compare
from analysis.diagnose.diagnose import diagnose, totals
from analysis.diagnose.plots import draw
from analysis.diagnose.tables import summary
from analysis.restore import Restored, RunArguments, describe, in_words, restore
from analysis.sample import SampleConfig, sample
from models import llama
from mxjax.products.implementations import compiler_options
from training.command_line import check_lists, flags_of
from training.config import Config
from training.data.load import load_data, load_held_out
from training.data.text import evaluation_batches
from training.files import write_atomically
from training.log.metrics import json_line
from training.process.environment import enable_compilation_cache, facts, input_errors
from training.process.extras import check_extra
from training.process.start import output_errors, program_name
from training.run.resume import changed_data, check_tokenizer_of, check_tokens_of
from training.step import evaluate, make_eval_step


@dataclasses.dataclass(frozen=True)
class EvalConfig(RunArguments):
    """An evaluation. A flag that is not given takes the run's value."""

    data: str | None = None
    """Evaluate on the validation part of this text or dataset PREFIX."""
    eval_data: str | None = None
    """Evaluate on all of this text or dataset PREFIX."""
    batches: int | None = None
    """Number of batches to read."""
    batch_size: int | None = None
    """Sequences a batch, where the run's need too much memory."""


@dataclasses.dataclass(frozen=True)
class DiagnoseConfig(EvalConfig):
    """A diagnosis of the errors of a model's GEMMs. A flag that is not given takes the run's value."""

    batches: int | None = 8
    """Number of batches, at least 3."""
    out: pathlib.Path | None = None
    """Also write diagnosis.json, heat maps by layer and histograms into this folder (extra plot)."""


COMMANDS = {"compare": CompareConfig, "diagnose": DiagnoseConfig, "sample": SampleConfig}


def main(arguments: EvalConfig) -> dict[str, float | str | int | None]:
    """Returns the run, step and policy, the mean loss over all tokens, and its perplexity."""
    enable_compilation_cache()
    with input_errors():
        restored = restore(arguments)
        held_out = read_batches(arguments, restored)
    _, model, params, _, phase, implementation = restored

    def losses(params, batch, key):
        options: dict[str, Any] = {"policies": phase.layers, "key": key, "implementation": implementation}
        return llama.losses(model, params, batch, **options)

    xla_options = compiler_options(phase.layers.policies, implementation)
    result = evaluate(make_eval_step(losses, xla_options), params, held_out)
    return describe(arguments, restored) | result


def diagnose_run(arguments: DiagnoseConfig) -> dict[str, Any]:
    """Diagnoses a checkpoint and prints the tables, unless `json`; with `out` writes all and draws plots.

    Returns the diagnosis.
    """
    enable_compilation_cache()
    with input_errors():
        if arguments.out is not None:
            check_extra("plot", "--out", "matplotlib")
            arguments.out.mkdir(parents=True, exist_ok=True)
        restored = restore(arguments)
        batches = read_batches(arguments, restored)
        _, model, params, _, phase, implementation = restored
        found = diagnose(model, params, phase.layers, implementation, batches, say=_say_while_measuring)
    described = describe(arguments, restored)
    shape = {"batches": len(batches), "tokens": sum(batch[:, 1:].size for batch in batches)}
    found = described | shape | found | {"versions": facts()}
    said = [summary(found)]
    if arguments.out is not None:
        with input_errors():
            write_atomically(arguments.out / "diagnosis.json", json_line(found) + "\n")
            drawn = draw(found, arguments.out)
        said += map(str, drawn)
    if not arguments.json:
        show(*said)
    return found


def _say_while_measuring(text: str) -> None:
    print(f"measuring: {text}", file=sys.stderr, flush=True)


def read_batches(arguments: EvalConfig, restored: Restored) -> list[np.ndarray]:
    """Returns the batches to run the model on; raises ValueError for bad arguments."""
    config, vocab_size = restored.config, restored.model.vocab_size
    n_batches = config.eval_batches if arguments.batches is None else arguments.batches
    size = config.data.batch_size if arguments.batch_size is None else arguments.batch_size
    if min(n_batches, size) < 1:
        raise ValueError(f"--batches and --batch-size must be at least 1, got {n_batches} and {size}")
    data, n_sequences = config.data, config.eval_sequences
    if arguments.batches is not None:
        data, n_sequences = dataclasses.replace(data, batch_size=size), None
    tokens = read_tokens(arguments, config, vocab_size)
    found = evaluation_batches(tokens, data, n_batches, vocab_size, n_sequences=n_sequences)
    sequences = np.concatenate(list(found))  # without --batches those of the run's evaluations
    return [sequences[i : i + size] for i in range(0, len(sequences), size)]


def read_tokens(arguments: EvalConfig, config: Config, vocab_size: int) -> np.ndarray:
    """Returns the tokens to evaluate on."""
    if arguments.data is not None and arguments.eval_data is not None:
        raise ValueError(
            "--data evaluates on the validation part and --eval-data on everything: give one of them"
        )
    for flag, path, whole in (("--data", arguments.data, False), ("--eval-data", arguments.eval_data, True)):
        if path is not None:
            check_tokens_of(arguments.run, flag, path)
            check_tokenizer_of(arguments.run, flag, path)
            return load_held_out(path, vocab_size, whole, config.data.seq_len)
    corpus = load_data(config.data, vocab_size)
    if (line := changed_data(arguments.run, corpus.facts)) is not None:
        print(f"{program_name()}: warning: {line}", file=sys.stderr)
    return corpus.validation


def run_command(argv: list[str]) -> None:
    """Runs `eval.py ARGUMENTS`."""
    check_lists(argv)
    if argv and argv[0] in COMMANDS:
        command(argv[0], argv[1:])
    else:
        evaluate_run(argv)


def command(name: str, argv: list[str]) -> None:
    """Runs `eval.py compare`, `diagnose` or `sample`, and prints its result, with --json as one line of JSON.

    Of a diagnosis that line has the numbers over all layers; `--out` writes those of every layer.
    """
    program = f"eval.py {name}"
    arguments = flags_of(COMMANDS[name], argv, program, prog=program)
    if isinstance(arguments, DiagnoseConfig):
        result = totals(diagnose_run(arguments))
    elif isinstance(arguments, CompareConfig):
        with input_errors():
            result = compare(arguments)
    else:
        enable_compilation_cache()
        with input_errors():
            result = sample(arguments)
        if not arguments.json:
            show(arguments.prompt + result["text"])
    if arguments.json:
        show(json_line(result))


def evaluate_run(argv: list[str]) -> None:
    """Runs `eval.py RUN`, and prints its result in words, with --json as one line of JSON."""
    first = next(iter(argv), "")
    close = difflib.get_close_matches(first, COMMANDS, n=1)
    if close and not pathlib.Path(first).exists():
        print(f"eval.py: error: {first} is no run; did you mean eval.py {close[0]}?", file=sys.stderr)
        sys.exit(2)
    arguments = flags_of(EvalConfig, argv, prog="eval.py", description=__doc__)
    result = main(arguments)
    said = f"step {result['step']}  policy {in_words(result)}  eval loss {result['eval_loss']:.4f}  "
    said += f"perplexity {result['eval_perplexity']:.3f}  over {result['eval_tokens']:,} tokens"
    show(json_line(result) if arguments.json else said)


def show(*lines: str) -> None:
    """Prints lines; ends the program with one line if standard output does not take them."""
    with output_errors():
        print(*lines, sep="\n")


if __name__ == "__main__":
    run_command(sys.argv[1:])
