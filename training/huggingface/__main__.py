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

import jax

from training.command_line import command_and_flags
from training.huggingface import PROGRAM
from training.huggingface.exporting import export_checkpoint
from training.huggingface.importing import import_checkpoint
from training.process.environment import input_errors, start_jax
from training.process.start import output_errors, unwinding_signals


def main() -> None:
    """Runs the command line."""
    jax.config.update("jax_platforms", "cpu")  # the weights need no accelerator
    run = command_and_flags({"import": import_checkpoint, "export": export_checkpoint}, PROGRAM, __doc__)
    with unwinding_signals(), input_errors():
        start_jax()
        said = run()
    with output_errors():
        print(said)


if __name__ == "__main__":
    main()
