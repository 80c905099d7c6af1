"""The loss of a restored model on held-out tokens: `python eval.py RUN`."""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Int

from analysis.restore import Restored, RunArguments
from models import decoder
from mxjax.products.implementations import compiler_options
from training.config import Config
from training.data.evaluation_sets import (
    Evaluation,
    EvaluationSet,
    absolute_eval_data,
    evaluate_sets,
    parse_eval_data,
)
from training.data.load import Tokens, documents_of, held_out_tokens, load_data, load_held_out, make_sets
from training.files import make_absolute
from training.flags.ranges import COUNT, check_ranges
from training.process.start import program_name
from training.run.resume import changed_data
from training.run.tokens import check_tokens_of
from training.step import evaluate, make_eval_step

Batch = Int[np.ndarray, "batch length"]


@dataclasses.dataclass(frozen=True)
class EvalConfig(RunArguments):
    """An evaluation. A flag that is not given takes the run's value."""

    data: str | None = None
    """Evaluate on the validation part of this text or dataset PREFIX."""
    eval_data: tuple[str, ...] = ()
    """Evaluate on all of this text or dataset PREFIX, or of several as NAME=PREFIX NAME=PREFIX ..."""
    batches: int | None = None
    """Number of batches to read."""
    batch_size: int | None = None
    """Sequences a batch, where the run's need too much memory."""
    document_mask: Literal["on", "off"] | None = None
    """on: attention stays within a document, as in train.py; off: it sees all earlier tokens. Default: as in
    the run; an imported checkpoint has no mask."""

    def __post_init__(self):
        make_absolute(self, "data")
        object.__setattr__(self, "eval_data", absolute_eval_data(self.eval_data))
        parse_eval_data(self.eval_data)  # refuses what is malformed
        check_ranges(vars(self), {"batches": COUNT, "batch_size": COUNT})


def evaluate_model(restored: Restored, sets: Sequence[EvaluationSet]) -> Evaluation:
    """Returns each set's mean loss over all tokens, perplexity, bits per byte, and counts."""
    _, model, params, _, phase, implementation, documents = restored

    def losses(params, batch, key):
        options: dict[str, Any] = {"policies": phase.layers, "key": key, "implementation": implementation}
        options["documents"] = documents
        return decoder.losses(model, params, batch, **options)

    xla_options = compiler_options(phase.layers.policies, implementation)
    eval_step = make_eval_step(losses, xla_options)
    return evaluate_sets(sets, lambda batches: evaluate(eval_step, params, batches))


def with_mask(arguments: EvalConfig, restored: Restored) -> Restored:
    """Returns the model with the mask of documents that --document-mask names.

    Raises:
      ValueError: no token ends every document of the data.
    """
    if arguments.document_mask is None:
        return restored
    paths = [arguments.data] if arguments.data else list(parse_eval_data(arguments.eval_data).values())
    own = restored.config.data
    data = dataclasses.replace(
        own, data=tuple(paths[:1]) or own.data, eval_data=(), document_mask=arguments.document_mask
    )
    return restored._replace(documents=documents_of(data, load_data(data, restored.model.vocab_size)))


def read_sets(arguments: EvalConfig, restored: Restored) -> list[EvaluationSet]:
    """Returns the sets to run the model on: without --batches those of the run's own evaluations.

    Raises:
      ValueError: the data is not what the run can be evaluated on.
    """
    config, vocab_size = restored.config, restored.model.vocab_size
    n_batches = config.eval_batches if arguments.batches is None else arguments.batches
    size = config.data.batch_size if arguments.batch_size is None else arguments.batch_size
    data, n_sequences = config.data, config.eval_sequences
    if arguments.batches is not None:
        data, n_sequences = dataclasses.replace(data, batch_size=size), None
    tokens, paths = read_tokens(arguments, config, vocab_size)
    found = make_sets(tokens, data, n_batches, vocab_size, n_sequences, paths)
    whole = (np.concatenate(one.batches) for one in found)
    batches = ([rows[i : i + size] for i in range(0, len(rows), size)] for rows in whole)
    return [one._replace(batches=each) for one, each in zip(found, batches, strict=True)]


def read_tokens(
    arguments: EvalConfig, config: Config, vocab_size: int
) -> tuple[dict[str, Tokens], list[str]]:
    """Returns the tokens of each set by name, and where they come from.

    A warning says if the run's data has changed since it began.
    """
    if arguments.data is not None and arguments.eval_data:
        raise ValueError(
            "--data evaluates on the validation part and --eval-data on everything: give one of them"
        )
    flag, whole = ("--eval-data", True) if arguments.data is None else ("--data", False)
    paths = parse_eval_data(arguments.eval_data) if arguments.data is None else {"": arguments.data}
    for path in paths.values():
        check_tokens_of(arguments.run, flag, path)
    if paths:
        seq_len = config.data.seq_len
        tokens = {name: load_held_out(path, vocab_size, whole, seq_len) for name, path in paths.items()}
        return tokens, list(paths.values())
    if not config.data.data:
        check_tokens_of(arguments.run, "--eval-data", "")
    corpus = load_data(config.data, vocab_size)
    if (line := changed_data(arguments.run, corpus.facts)) is not None:
        print(f"{program_name()}: warning: {line}", file=sys.stderr)
    return held_out_tokens(config.data, corpus), list(config.data.eval_paths.values())
