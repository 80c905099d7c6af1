"""Imports and exports checkpoints: `python -m models.huggingface import DIR RUN`, `export RUN DIR`.

`import` turns a folder with config.json and safetensors into a run at step 0, for eval.py and train.py
(`--init RUN` in a new folder, or `--out RUN --resume` in place). The tokenizer and other small files are kept
in RUN/huggingface, and `export` restores them. Tensors are converted one by one: memory holds the parameters
in float32 and one more tensor.

This is a program, like train.py: it may import `training`, which the modules of `models` may not.
"""

import signal
import sys

import jax
import tyro

from training.environment import input_errors
from training.huggingface_runs import export_checkpoint, import_checkpoint


def main() -> None:
    """Runs the command line."""
    jax.config.update("jax_platforms", "cpu")  # the weights need no accelerator
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # removes what is half-made
    with input_errors():
        commands = {"import": import_checkpoint, "export": export_checkpoint}
        config = tyro.extras.subcommand_cli_from_dict(
            commands, prog="python -m models.huggingface", description=__doc__
        )
        print(f"{config.n_params:,} parameters: {config}")


if __name__ == "__main__":
    main()
