"""Text from a run's model: `python eval.py sample RUN --prompt TEXT`."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from analysis.restore import Restored, RunArguments
from models.attention.documents import Documents
from models.configs import DecoderConfig
from models.generation import Options, cache_bytes, generate
from training.data.megatron import is_indexed
from training.data.text import END_OF_DOCUMENT, VOCAB_SIZE
from training.data.tokenizer import end_of_document, load_tokenizer
from training.flags.ranges import COUNT, NOT_NEGATIVE, SEED, Range, check_ranges
from training.memory import gib, memory_there_is
from training.process.start import program_name
from training.run.resume import begun_run
from training.run.tokens import find_tokenizer

_SHARE = Range("greater than 0 and at most 1", lambda x: 0 < x <= 1)
_RANGES = {"tokens": COUNT, "temperature": NOT_NEGATIVE, "top_p": _SHARE, "seed": SEED}


@dataclasses.dataclass(frozen=True)
class SampleConfig(RunArguments):
    """Generation of text by a run's checkpoint. A flag that is not given takes the run's value."""

    prompt: str = ""
    """Text to continue. Empty: begin a document."""
    tokens: int = 64
    """Largest number of tokens to generate; the end of a document ends the text before."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the most probable token."""
    top_p: float = 1.0
    """Draw among the fewest most probable tokens whose probabilities sum to at least this."""
    seed: int = 0
    """Draws the tokens, and the policy's random bits."""

    def __post_init__(self):
        super().__post_init__()
        try:
            self.prompt.encode()
        except UnicodeEncodeError as error:  # of bytes that Python could not decode
            wrong = os.fsencode(self.prompt[error.start])
            at = len(os.fsencode(self.prompt[: error.start])) + 1
            raise ValueError(
                f"--prompt is not UTF-8: its byte {at} is 0x{wrong.hex()}; convert it, for example with iconv"
            ) from None
        check_ranges(vars(self), _RANGES)
        if not self.temperature and self.top_p != 1:
            raise ValueError(
                f"--top-p {self.top_p} draws nothing with --temperature 0, which takes the most probable "
                "token; leave one of them out"
            )


class Codec(NamedTuple):
    """Text to token ids and back, and the id that ends a document, if there is one."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    end: int | None


def generate_text(arguments: SampleConfig, restored: Restored) -> dict[str, Any]:
    """Returns the seed, the number of generated tokens, and their text.

    A line on standard error says if the text is longer than the sequences of the training.

    Raises:
      ValueError: the run has no tokenizer, the prompt has no tokens, or the text does not fit in memory.
    """
    codec = codec_of(arguments.run, restored)
    prompt = codec.encode(arguments.prompt)
    if not arguments.prompt and codec.end is not None:
        prompt = [codec.end]  # what precedes a document in the data
    if not prompt:
        raise ValueError("--prompt has no tokens, and the tokenizer none that ends a document; give a prompt")
    if max(prompt) >= restored.model.vocab_size:
        raise ValueError(
            f"--prompt has token {max(prompt)} and the model {restored.model.vocab_size}: the tokenizer is "
            "not the model's"
        )
    check_length(restored.model, len(prompt) + arguments.tokens)
    found: list[int] = []
    for token in _tokens(arguments, restored, prompt):
        if token == codec.end:
            break
        found.append(token)
    if (line := beyond_training(arguments.run, restored, len(prompt) + len(found))) is not None:
        print(f"{program_name()}: warning: {line}", file=sys.stderr)
    return {"seed": arguments.seed, "tokens": len(found), "text": codec.decode(found)}


def beyond_training(run: pathlib.Path, restored: Restored, length: int) -> str | None:
    """Returns a line if a text of so many tokens is longer than the sequences of the run; else None.

    An imported checkpoint's configuration holds a length for evaluations, not that of its training.
    """
    trained = restored.config.data.seq_len
    if length <= trained or begun_run(run) is None:
        return None
    return (
        f"the text has {length:,} tokens with its prompt, and the run has --seq-len {trained:,}: "
        "it was trained on none so long"
    )


def check_length(model: DecoderConfig, length: int) -> None:
    """Raises ValueError if the keys and values of so many tokens need more memory than the device has."""
    size, there_is = cache_bytes(model, length), memory_there_is()
    if size > there_is:
        raise ValueError(
            f"--tokens: keys and values of {length:,} tokens take {gib(size)} GiB and the device has "
            f"{gib(there_is)}; ask for fewer"
        )


def _tokens(arguments: SampleConfig, restored: Restored, prompt: list[int]):
    """Yields the ids of the tokens that follow the prompt."""
    options = Options(restored.phase.layers, restored.implementation, documents=restored.documents)
    drawn = generate(
        restored.model,
        options,
        jax.tree.map(jnp.asarray, restored.params),
        jnp.array([prompt], jnp.int32),
        arguments.tokens,
        jax.random.key(arguments.seed),
        temperature=arguments.temperature,
        top_p=arguments.top_p,
    )
    yield from (int(token[0]) for token in drawn)


def codec_of(run: pathlib.Path, restored: Restored) -> Codec:
    """Returns the tokenizer of a run's dataset or of an imported checkpoint, or bytes for a run on text.

    Raises:
      ValueError: the run has no tokenizer, one with other tokens lies in its place, or its data is gone.
    """
    data = restored.config.data.data
    begun = begun_run(run) is not None
    indexed = begun and bool(data) and is_indexed(data)
    reads_bytes = restored.model.vocab_size == VOCAB_SIZE  # that of text, so that the data was no dataset
    if begun and data and not (indexed or reads_bytes) and not pathlib.Path(data[0]).exists():
        raise ValueError(
            f"{data[0]}, which {run} was trained on, is gone, so that its tokenizer is unknown; put it back, "
            "or of a dataset its .idx and .tokenizer.json"
        )
    if begun and not indexed and restored.model.vocab_size > END_OF_DOCUMENT:
        return Codec(lambda text: list(text.encode()), _text_of_bytes, END_OF_DOCUMENT)
    path, paths = find_tokenizer(run, data)
    if path is None:
        raise ValueError(f"{run} has no tokenizer; one of {', '.join(map(str, paths))} must exist")
    return _tokenizer_codec(path, restored.documents)


def _tokenizer_codec(path: pathlib.Path, documents: Documents | None) -> Codec:
    tokenizer = load_tokenizer(path)
    end = None if documents is None else documents.end  # which may have any name
    if end is None:
        with contextlib.suppress(ValueError):
            _, end = end_of_document(tokenizer, None)
    # As in training.tokenize, nothing is added to the text.
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    return Codec(lambda text: encode(text).ids, tokenizer.decode, end)


def _text_of_bytes(ids: Sequence[int]) -> str:
    return bytes(i for i in ids if i < END_OF_DOCUMENT).decode(errors="replace")
