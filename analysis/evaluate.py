"""The loss of a restored model on held-out tokens: `python eval.py RUN`."""

import dataclasses
import sys
from typing import Any

import numpy as np
from jaxtyping import Int

from analysis.restore import Restored, RunArguments
from models import decoder
from mxjax.products.implementations import compiler_options
from training.config import Config
from training.data.load import load_data, load_held_out
from training.data.text import evaluation_batches
from training.files import make_absolute
from training.process.start import program_name
from training.ranges import COUNT, check_ranges
from training.run.resume import changed_data
from training.run.tokens import check_tokenizer_of, check_tokens_of
from training.step import evaluate, make_eval_step

Batch = Int[np.ndarray, "batch length"]


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

    def __post_init__(self):
        make_absolute(self, "data", "eval_data")
        check_ranges(vars(self), {"batches": COUNT, "batch_size": COUNT})


def evaluate_model(restored: Restored, batches: list[Batch]) -> dict[str, Any]:
    """Returns the mean loss over all tokens of the batches, its perplexity, and the number of tokens."""
    _, model, params, _, phase, implementation, documents = restored

    def losses(params, batch, key):
        options: dict[str, Any] = {"policies": phase.layers, "key": key, "implementation": implementation}
        options["documents"] = documents
        return decoder.losses(model, params, batch, **options)

    xla_options = compiler_options(phase.layers.policies, implementation)
    return evaluate(make_eval_step(losses, xla_options), params, batches)


def read_batches(arguments: EvalConfig, restored: Restored) -> list[Batch]:
    """Returns the batches to run the model on: without --batches those of the run's own evaluations.

    Raises:
      ValueError: the data is not what the run can be evaluated on.
    """
    config, vocab_size = restored.config, restored.model.vocab_size
    n_batches = config.eval_batches if arguments.batches is None else arguments.batches
    size = config.data.batch_size if arguments.batch_size is None else arguments.batch_size
    data, n_sequences = config.data, config.eval_sequences
    if arguments.batches is not None:
        data, n_sequences = dataclasses.replace(data, batch_size=size), None
    tokens = read_tokens(arguments, config, vocab_size)
    found = evaluation_batches(tokens, data, n_batches, vocab_size, n_sequences=n_sequences)
    sequences = np.concatenate(list(found))  # --batch-size regroups the sequences, and changes none
    return [sequences[i : i + size] for i in range(0, len(sequences), size)]


def read_tokens(arguments: EvalConfig, config: Config, vocab_size: int) -> Int[np.ndarray, " tokens"]:
    """Returns the tokens to evaluate on; a warning says if the run's data has changed since it began."""
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
