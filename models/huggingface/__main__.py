"""Checkpoints to and from Hugging Face: `python -m models.huggingface import DIR RUN`, `export RUN DIR`.

`import` makes a run's folder, at step 0, of a folder with config.json and safetensors; eval.py and train.py
go on from there (`--init RUN` in a new folder, or `--out RUN --resume` in place). Tokenizer and other small
files are kept in RUN/huggingface, and `export` puts them back. Tensors pass one by one: memory holds the
parameters in float32, and one tensor more.
"""

import jax
import tyro

from training.environment import input_errors
from training.huggingface_runs import export_checkpoint, import_checkpoint


def main() -> None:
    """Runs the command line."""
    jax.config.update("jax_platforms", "cpu")  # weights pass through memory alone
    with input_errors():
        commands = {"import": import_checkpoint, "export": export_checkpoint}
        config = tyro.extras.subcommand_cli_from_dict(
            commands, prog="python -m models.huggingface", description=__doc__
        )
        print(f"{config.n_params:,} parameters: {config}")


if __name__ == "__main__":
    main()
