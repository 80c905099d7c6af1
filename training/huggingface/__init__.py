"""Hugging Face checkpoints and runs: `python -m training.huggingface import DIR RUN`, `export RUN DIR`."""

PROGRAM = "python -m training.huggingface"
