"""The plan of a run: what its configuration, data and devices decide, and what stays the same throughout."""

import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from models.attention.documents import Documents
from models.configs import DecoderConfig
from training.config import Config
from training.data.evaluation_sets import EvaluationSet
from training.data.megatron import MegatronCorpus
from training.data.text import TextCorpus
from training.phases import Phase
from training.sharding import filled_size, resize_on


class Plan(NamedTuple):
    """Everything that stays the same throughout a run, apart from its folder.

    Attributes:
      corpus: the training data.
      held_out: the evaluation sets; the first decides the best checkpoint and whether the target is reached.
      imported: the folder of the Hugging Face checkpoint with whose weights the run began; None for others.
      tokenizer: a checksum of the tokenizer of the data, see `training.run.tokens`; None for text.
      documents: the documents that attention keeps apart; None without a mask.
      policy_files: size and CRC32 of each file that policies came from, by its path, as the run began.
    """

    config: Config
    mesh: jax.sharding.Mesh
    corpus: TextCorpus | MegatronCorpus
    held_out: tuple[EvaluationSet, ...]
    model: DecoderConfig
    phases: tuple[Phase, ...]
    imported: str | None = None
    tokenizer: str | None = None
    documents: Documents | None = None
    policy_files: Mapping[str, Any] = types.MappingProxyType({})

    def batch_of(self, step: int) -> tuple[np.ndarray, dict[str, list]]:
        """Returns the batch of a step and its origin in the data."""
        arguments = self.config.data, self.config.seed, self.config.steps, step - 1
        return next(self.corpus.batches(*arguments)), self.corpus.batch_indices(*arguments)

    @property
    def filled_vocab_size(self) -> int:
        """The vocabulary of the training state; see `training.sharding`."""
        return filled_size(self.mesh.shape, self.model, [phase.layers for phase in self.phases])

    def filled(self, tree: Any) -> Any:
        """Returns parameters, or a training state, with the vocabulary that the mesh needs."""
        return resize_on(self.mesh, tree, self.filled_vocab_size)

    def unfilled(self, tree: Any) -> Any:
        """Returns parameters, or a training state, with the model's own vocabulary, as in checkpoints."""
        return resize_on(self.mesh, tree, self.model.vocab_size)
