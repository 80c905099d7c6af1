"""Imports and exports checkpoints: `python -m training.huggingface import DIR RUN`, `export RUN DIR`.

`import` turns a folder with config.json and safetensors into a run at step 0, for eval.py and train.py
(`--init RUN` in a new folder, or `--out RUN --resume` in place). The tokenizer and other small files are kept
in RUN/huggingface, and `export` restores them. Tensors are converted one by one: memory holds the parameters
in float32 and one more tensor.
"""

if __name__ == "__main__":
    try:
        from training.process.start import prepare_process
    except ImportError as error:  # of an extra that is not installed
        raise SystemExit(f"python -m training.huggingface: error: {error}") from None

    prepare_process()  # before the other imports, which take seconds

import functools
import sys
from collections.abc import Callable

import jax
import tyro

from training.command_line import check_lists, flags
from training.huggingface import PROGRAM
from training.huggingface.exporting import export_checkpoint
from training.huggingface.importing import import_checkpoint
from training.process.environment import input_errors, start_jax
from training.process.start import output_errors, unwinding_signals


def main() -> None:
    """Runs the command line."""
    jax.config.update("jax_platforms", "cpu")  # the weights need no accelerator
    commands = {"import": import_checkpoint, "export": export_checkpoint}
    if (command := commands.get("".join(sys.argv[1:2]))) is not None:
        check_lists(command, sys.argv, PROGRAM)
    later = {name: _later(command) for name, command in commands.items()}
    parse = tyro.extras.subcommand_cli_from_dict
    run = flags(lambda words: parse(later, args=words, prog=PROGRAM, description=__doc__), program=PROGRAM)
    with unwinding_signals(), input_errors():
        start_jax()
        said = run()
    with output_errors():
        print(said)


def _later[**P, T](command: Callable[P, T]) -> Callable[P, Callable[[], T]]:
    """Returns a function with the command's signature that returns a call of it."""

    @functools.wraps(command)
    def bind(*args: P.args, **kwargs: P.kwargs) -> Callable[[], T]:
        return functools.partial(command, *args, **kwargs)

    return bind


if __name__ == "__main__":
    main()
