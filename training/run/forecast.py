"""The forecast that `--plan` prints: the memory of a step, and what to change if it does not fit.

Nothing is computed or written, and the mesh may have more devices than there are: shapes are traced.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType

from models.attention.context import sequence_parts
from models.attention.documents import Documents
from models.configs import DecoderConfig
from models.experts.traffic import traffic_text
from models.sharding import batch_parts_of
from mxjax.products.implementations import check_remat
from mxjax.runtime.remat import Remat
from training.config import Config
from training.data.load import documents_of, load_data
from training.memory import Memory, gib, memory_there_is
from training.phases import Phase, expand
from training.run.frozen import check_lora, frozen_shapes
from training.run.record import documents_of_run
from training.run.resume import begun_config
from training.run.setup import check_phases, choose, fits_mesh
from training.sharding import abstract_state, check_batch, filled_size, parse_mesh
from training.trainer import as_stored, memory_of_run, optimizer_of_phase

_REMATS: tuple[Remat, ...] = ("none", "dots", "fp4", "full")  # from most to least memory
_MORE_DEVICES = 4  # doublings to try
# GB of memory by the data sheets of NVIDIA H100 SXM and H200, and of AMD Instinct MI355X.
_GPUS = types.MappingProxyType({"H100": 80, "H200": 141, "MI355X": 288})
# JAX takes the first share of a GPU's memory by default (docs.jax.dev, "GPU memory allocation"); the second
# leaves room for libraries.
_SHARES = types.MappingProxyType({0.75: "fits", 0.92: "fits with XLA_PYTHON_CLIENT_MEM_FRACTION=0.92"})


class Setting(NamedTuple):
    """Settings that change memory, and of the results only the order of sums."""

    remat: Remat
    accumulate: int
    mesh: Mapping[str, int]


class Forecast(NamedTuple):
    """A configuration, from which `memory` estimates a step under any setting."""

    config: Config
    model: DecoderConfig
    phases: Sequence[Phase]
    documents: Documents | None

    def memory(self, setting: Setting) -> Memory:
        """Returns the estimate of the phase that takes most."""
        changes = {"remat": setting.remat, "accumulate": setting.accumulate}
        config, sizes = dataclasses.replace(self.config, **changes), setting.mesh
        axes = (AxisType.Auto,) * len(sizes)
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=axes)
        filled = filled_size(sizes, self.model, [phase.layers for phase in self.phases])
        fill = functools.partial(as_stored, config=config, size=filled)
        optimizer = optimizer_of_phase(config, self.model, self.phases, self.phases[0])
        shapes = abstract_state(self.model, optimizer, mesh, fill)._replace(frozen=frozen_shapes(config))
        found = (
            memory_of_run(config, self.model, phase.layers, shapes, sizes, self.documents)
            for phase in self.phases
        )
        return max(found, key=lambda memory: memory.total)

    def changes(self, given: Setting) -> Iterator[Setting]:
        """Yields settings that may take less memory, the cheapest changes first."""
        batch, setting = self.config.data.batch_size, given
        for remat in _REMATS[_REMATS.index(given.remat) + 1 :]:
            with contextlib.suppress(ValueError):
                for phase in self.phases:
                    check_remat(remat, phase.layers.policies, self.config.precision.implementation)
                yield (setting := setting._replace(remat=remat))
        while self._can_run(more := setting._replace(accumulate=2 * setting.accumulate)):
            yield (setting := more)
        for _ in range(_MORE_DEVICES):
            for axis in ("fsdp", "context", "tensor"):
                sizes = {**setting.mesh, axis: 2 * setting.mesh[axis]}
                accumulate = math.gcd(setting.accumulate, batch // batch_parts_of(sizes) or 1)
                if self._can_run(more := setting._replace(mesh=sizes, accumulate=accumulate)):
                    yield (setting := more)
                    break

    def _can_run(self, setting: Setting) -> bool:
        data, sizes = self.config.data, setting.mesh
        if self.config.lora is not None and math.prod(sizes.values()) > 1:
            return False
        if data.batch_size % (batch_parts_of(sizes) * setting.accumulate):
            return False
        with contextlib.suppress(ValueError):
            sequence_parts(sizes, data.batch_size // setting.accumulate, data.seq_len)
            check_phases(sizes, self.model, self.phases)
            return True
        return False


def forecast(config: Config) -> str:
    """Returns the estimate, the GPUs and whether a device of this machine fit it, and else what to change.

    Without --data the model has its own vocabulary, and a mask of documents unless --document-mask is off.

    Raises:
      ValueError: no run could begin with this configuration.
    """
    outline = _outline(expand(config))
    config, model = outline.config, outline.model
    given = Setting(
        config.remat, config.accumulate, parse_mesh(config.mesh, None if config.mesh else jax.device_count())
    )
    check_lora(config, math.prod(given.mesh.values()))
    fits = functools.partial(fits_mesh, model, outline.phases)
    check_batch(given.mesh, config.data.batch_size, config.accumulate, fits)
    check_phases(given.mesh, model, outline.phases)
    needed, there_is = outline.memory(given), memory_there_is()
    lines = [
        f"model {config.model_name}: {model.n_params:,} parameters, {model.vocab_size:,} tokens; "
        f"--batch-size {config.data.batch_size} --seq-len {config.data.seq_len}, "
        f"{'no' if outline.documents is None else 'a'} mask of documents",
        f"memory a device with {_flags(given)}: {needed}",
        *traffic_text(model, given.mesh, config.data.tokens_a_step, config.expert_traffic),
        gpus_in_words(needed.total),
    ]
    device = f"the {gib(there_is)} GiB of a device here ({jax.local_devices()[0].device_kind})"
    if needed.total <= there_is:
        return "\n".join([*lines, f"that fits {device}"])
    lines.append(f"that is more than {device}; with less memory, and the first of these GPUs that has it:")
    least = needed.total
    for setting in outline.changes(given):
        total = outline.memory(setting).total
        if total >= least:
            continue
        least = total
        room = (name for name, gigabytes in _GPUS.items() if total <= max(_SHARES) * gigabytes * 1e9)
        words = f"{gib(total)} GiB", *itertools.islice(room, 1), *(["fits here"] if total <= there_is else [])
        lines.append(f"  {_flags(setting)}: {', '.join(words)}")
        if total <= there_is:
            return "\n".join(lines)
    lines.append("none of them fits: shorten --seq-len, or choose a smaller --model or more devices")
    return "\n".join(lines)


def gpus_in_words(size: float) -> str:
    """Returns which GPUs have room for so many bytes in each, as a line."""
    said = []
    for name, gigabytes in _GPUS.items():
        words = (words for share, words in _SHARES.items() if size <= share * gigabytes * 1e9)
        said.append(f"{name} ({gigabytes} GB) {next(words, 'is too small')}")
    return f"GPUs: {', '.join(said)}"


def _outline(config: Config) -> Forecast:
    """Returns the model, phases and documents of a configuration, checked as at the start of a run."""
    config, model, phases, _, saved = choose(config, config.folder())
    if begun_config(saved) is not None:
        return Forecast(config, model, phases, documents_of_run(saved))
    if config.data.data:
        corpus = load_data(config.data, model.vocab_size)
        model = dataclasses.replace(model, vocab_size=corpus.vocab_size)
        return Forecast(config, model, phases, documents_of(config.data, corpus))
    model = dataclasses.replace(model, vocab_size=config.data.vocab_size or model.vocab_size)
    has_mask = config.data.document_mask != "off"
    documents = Documents(0, config.data.restart_positions) if has_mask else None
    return Forecast(config, model, phases, documents)


def _flags(setting: Setting) -> str:
    axes = ",".join(f"{axis}={size}" for axis, size in setting.mesh.items() if size > 1)
    accumulate = f" --accumulate {setting.accumulate}" if setting.accumulate > 1 else ""
    return f"--remat {setting.remat}{accumulate}" + (f" --mesh {axes}" if axes else "")
