"""Evaluates a run's checkpoint, in its own precision or another: `python eval.py RUN --policy=bf16`.

`python eval.py compare RUN [RUN ...]` compares the evaluations of several runs.
`python eval.py diagnose RUN` measures the errors of every GEMM of one.
`python eval.py sample RUN --prompt TEXT` generates text.
`python eval.py report RUN [BASELINE ...] --out report.html` writes a page about one.

All print text to read, or with --json one line of JSON.
"""

if __name__ == "__main__":
    try:
        from training.process.start import prepare_process
    except ImportError as error:  # of an extra that is not installed
        raise SystemExit(f"eval.py: error: {error}") from None

    prepare_process()  # before the other imports, which take seconds

import difflib
import pathlib
import sys
from typing import Any

from analysis.compare.compare import CompareConfig, compare
from analysis.diagnose.diagnose import (
    DiagnoseConfig,
    check_batches,
    check_folder,
    diagnose_model,
    totals,
    write,
)
from analysis.diagnose.tables import summary
from analysis.evaluate import EvalConfig, evaluate_model, read_sets, with_mask
from analysis.report.report import ReportConfig, report
from analysis.restore import describe, in_words, restore
from analysis.sample import SampleConfig, generate_text
from training.command_line import flags_of
from training.log.metrics import in_words as result_in_words
from training.log.metrics import json_line
from training.process.environment import enable_compilation_cache, input_errors
from training.process.start import output_errors

Record = dict[str, Any]
"""The result of a command, for JSON."""


def main(argv: list[str]) -> None:
    """Runs a command, which prints its result in words, or prints that as one line of JSON."""
    check_command(argv)
    name = argv[0] if argv and argv[0] in COMMANDS else None
    flags, run = (EvalConfig, evaluate) if name is None else COMMANDS[name]
    program = "eval.py" if name is None else f"eval.py {name}"
    help_text = {"description": __doc__} if name is None else {}
    arguments = flags_of(flags, argv if name is None else argv[1:], program, prog=program, **help_text)
    with input_errors():
        record = run(arguments)
    if arguments.json:
        show(json_line(record))


def check_command(argv: list[str]) -> None:
    """Ends the program if the first argument is no folder and nearly the name of a command."""
    first = next(iter(argv), "")
    close = difflib.get_close_matches(first, COMMANDS, n=1)
    if close and first not in COMMANDS and not pathlib.Path(first).exists():
        print(f"eval.py: error: {first} is no run; did you mean eval.py {close[0]}?", file=sys.stderr)
        sys.exit(2)


def evaluate(arguments: EvalConfig) -> Record:
    """Returns the run, step and policy, and each set's loss, perplexity and bits per byte."""
    enable_compilation_cache()
    restored = restore(arguments)
    sets = read_sets(arguments, restored)
    found = describe(arguments, restored) | evaluate_model(with_mask(arguments, restored), sets)
    if not arguments.json:
        tokens = sum(batch[:, 1:].size for one in sets for batch in one.batches)
        result = f"{result_in_words(found)}  over {tokens:,} tokens"
        result += f" in sequences of {restored.config.data.seq_len:,}"
        show(f"step {found['step']}  policy {in_words(found)}  {result}")
    return found


def diagnose(arguments: DiagnoseConfig) -> Record:
    """Returns the errors over all layers; with `out` writes those of every layer, and draws them."""
    enable_compilation_cache()
    restored = restore(arguments)
    batches = read_sets(arguments, restored)[0].batches
    check_batches(batches)
    check_folder(arguments.out)
    masked = with_mask(arguments, restored)
    found = describe(arguments, restored) | diagnose_model(masked, batches, say=show_progress)
    files = [] if arguments.out is None else write(found, arguments.out)
    if not arguments.json:
        show(summary(found), *map(str, files))
    return totals(found)


def sample(arguments: SampleConfig) -> Record:
    """Returns the run, step and policy, and the text that follows the prompt."""
    enable_compilation_cache()
    restored = restore(arguments)
    found = describe(arguments, restored) | generate_text(arguments, restored)
    if not arguments.json:
        show(arguments.prompt + found["text"])
    return found


def write_report(arguments: ReportConfig) -> Record:
    """Writes the report of a run; returns its path, the runs' names, and the number of samples."""
    enable_compilation_cache()
    return report(arguments)


COMMANDS: dict[str, tuple[Any, Any]] = {
    "compare": (CompareConfig, compare),
    "diagnose": (DiagnoseConfig, diagnose),
    "report": (ReportConfig, write_report),
    "sample": (SampleConfig, sample),
}
"""The flags of each command, and the function that runs it. Without a command, a run is evaluated."""


def show(*lines: str) -> None:
    """Prints lines; ends the program with one line if standard output does not take them."""
    with output_errors():
        print(*lines, sep="\n")


def show_progress(text: str) -> None:
    """Prints what is measured next to standard error, which leaves standard output to the result."""
    print(f"measuring: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
