"""Imports and exports checkpoints: `python -m models.huggingface import DIR RUN`, `export RUN DIR`.

`import` turns a folder with config.json and safetensors into a run at step 0, for eval.py and train.py
(`--init RUN` in a new folder, or `--out RUN --resume` in place). The tokenizer and other small files are kept
in RUN/huggingface, and `export` restores them. Tensors are converted one by one: memory holds the parameters
in float32 and one more tensor.

This is a program, like train.py: it may import `training`, which the modules of `models` may not.
"""

if __name__ == "__main__":
    try:
        from training.startup import prepare_process
    except ImportError as error:  # of an extra that is not installed
        raise SystemExit(f"python -m models.huggingface: error: {error}") from None

    prepare_process()  # before the other imports, which take seconds

import functools
from collections.abc import Callable

import jax
import tyro

from training.environment import input_errors
from training.flags import flags
from training.huggingface_runs import export_checkpoint, import_checkpoint
from training.startup import output_errors, unwinding_signals

PROGRAM = "python -m models.huggingface"


def main() -> None:
    """Runs the command line."""
    jax.config.update("jax_platforms", "cpu")  # the weights need no accelerator
    commands = {"import": _later(import_checkpoint), "export": _later(export_checkpoint)}
    parse = tyro.extras.subcommand_cli_from_dict
    run = flags(lambda words: parse(commands, args=words, prog=PROGRAM, description=__doc__), program=PROGRAM)
    with unwinding_signals(), input_errors():
        config = run()
    with output_errors():
        print(f"{config.n_params:,} parameters: {config}")


def _later[**P, T](command: Callable[P, T]) -> Callable[P, Callable[[], T]]:
    """Returns a function with the command's signature that returns a call of it."""

    @functools.wraps(command)
    def bind(*args: P.args, **kwargs: P.kwargs) -> Callable[[], T]:
        return functools.partial(command, *args, **kwargs)

    return bind


if __name__ == "__main__":
    main()
