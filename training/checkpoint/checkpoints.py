"""Checkpoints of a run: the whole training state and the position in the data, by orbax.

A checkpoint appears in one piece, by renaming, once it and its manifest are written: a run that is killed at
any moment leaves whole ones, and what it was writing is removed at the next start. The random bits of a step
are a function of the seed and the step, so that the step says all there is of them.
"""

import contextlib
import dataclasses
import errno
import logging
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, LatestN, PreservationPolicy
from rich.filesize import decimal

from training.checkpoint import manifest
from training.checkpoint.recovery import describe_damage, find_problems, saved_steps
from training.processes import ProcessError, together
from training.step import TrainState


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; those before it are still there."""


class Checkpoints:
    """The checkpoints in a folder; saving goes on in the background. A context manager."""

    def __init__(
        self,
        folder: pathlib.Path,
        keep: int | None = None,
        losses: Mapping[int, float] | None = None,
    ):
        """Opens the folder.

        Args:
          folder: of the checkpoints.
          keep: how many of the newest to keep, and to remove what an interrupted save left; None keeps all.
          losses: evaluation losses by step; the checkpoint with the lowest is kept in addition.
        """
        self._folder = folder.absolute()
        self.losses = dict(losses or {})  # to which later evaluations are added
        self._saving: tuple[int, int] | None = None  # the step and its size in bytes
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy([LatestN(keep), _Best(self.losses)]),
            cleanup_tmp_directories=keep is not None,
            lightweight_initialize=True,  # reads nothing of what might be damaged
            enable_async_checkpointing=True,
            async_options=ocp.AsyncOptions(
                post_finalization_callback=self._write_manifest, barrier_sync_fn=self._barrier
            ),
        )
        self._manager = _Manager(self._folder, options=options)
        logging.getLogger("absl").addFilter(_is_no_orbax_error)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception) -> None:
        try:
            self.wait()
        finally:
            with contextlib.suppress(OSError, ValueError):  # that of the save which `wait` has reported
                self._manager.close()
            logging.getLogger("absl").removeFilter(_is_no_orbax_error)

    @property
    def latest(self) -> int | None:
        """The newest step saved, or None."""
        return self._manager.latest_step()

    @property
    def best(self) -> int | None:
        """The saved step with the lowest of the losses, or None."""
        return _best(self._manager.all_steps(), self.losses)

    def save(self, state: TrainState, data_position: dict[str, Any]) -> None:
        """Starts saving the state, and where the data stands, as the checkpoint of the state's step.

        Raises:
          CheckpointError: this save, or the one before it, has failed.
        """
        step = int(state.step)
        if step == self.latest:
            return
        self.wait()
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        self._saving = step, size
        with self._errors():
            with together():
                if shutil.disk_usage(self._folder).free < size:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(state.params),
                    rest=ocp.args.StandardSave(_rest(state)),
                    data=ocp.args.JsonSave(data_position),
                ),
            )

    def check(self) -> None:
        """Raises CheckpointError if the save in the background has failed; does not wait for it."""
        if self._saving is not None and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Waits for what is being saved; raises CheckpointError if that fails."""
        if self._saving is not None:
            with self._errors():
                self._manager.wait_until_finished()
            self._saving = None

    def restore(self, like: TrainState) -> tuple[TrainState, dict[str, Any] | None]:
        """Returns the newest state, with the shapes and dtypes of `like`, and the position in the data.

        Of a run that has not begun, see `save_params`, it is `like` with the parameters saved, and None.
        Damage is not looked for: see `recovery.set_aside_damaged`.

        Raises:
          ValueError: there is no checkpoint, or it is of another model.
        """
        if self.latest is None:
            raise ValueError(f"no checkpoint in {self._folder}; start a new run")
        if not (self._folder / str(self.latest) / "rest").exists():
            return like._replace(params=self.restore_params(like.params)), None
        self._check_model(self.latest, like.params)
        found = self._manager.restore(
            self.latest,
            args=ocp.args.Composite(
                params=ocp.args.StandardRestore(_abstract(like.params)),
                rest=ocp.args.StandardRestore(_abstract(_rest(like))),
                data=ocp.args.JsonRestore(),
            ),
        )
        return TrainState(params=found["params"], **found["rest"]), found["data"]

    def restore_params(self, like: Any, step: int | None = None) -> Any:
        """Returns the parameters alone, of the newest step or the one named.

        Raises:
          ValueError: no such step, or its files are damaged, and the message lists those there are; or it is
            of another model.
        """
        steps = self._manager.all_steps()
        if not steps or step not in (None, *steps):
            raise ValueError(f"no checkpoint of step {step}; there are {sorted(steps) or 'none'}")
        step = max(steps) if step is None else step
        folder = self._folder / str(step)
        if problems := find_problems(folder):
            others = sorted(set(steps) - {step}) or "none"
            raise ValueError(f"{describe_damage(folder, problems)}; others are {others}")
        self._check_model(step, like)
        args = ocp.args.Composite(params=ocp.args.StandardRestore(_abstract(like)))
        return self._manager.restore(step, args=args)["params"]

    def _check_model(self, step: int, like: Any) -> None:
        """Raises ValueError unless a checkpoint's parameters have the names and shapes of `like`."""
        folder, handler = self._manager.directory / str(step), ocp.StandardCheckpointHandler()
        saved, wanted = _shapes(handler.metadata(folder / "params")), _shapes(like)
        handler.close()
        if other := sorted(name for name in saved.keys() | wanted if saved.get(name) != wanted.get(name)):
            name = other[0]
            raise ValueError(
                f"checkpoint {folder} is of another model: of {len(other)} parameters that differ, {name} "
                f"has shape {saved.get(name, 'none')} there, and {wanted.get(name, 'none')} here. Does it "
                "belong to this run's config.json?"
            )

    def _write_manifest(self) -> None:
        """Is called, by one process, between writing a checkpoint and renaming it."""
        manifest.write(self._partial())

    def _barrier(self, *, key: str, timeout_ms: int) -> None:
        """Waits for all processes, in the background; each first adds up what it has written.

        Should orbax change, this is not found, and the first adds up all; so it does what another could not.
        """
        if "async_write_complete" in key:
            with contextlib.suppress(OSError, StopIteration):  # else the others would wait for this one
                manifest.write_part(self._partial(), jax.process_index())
        ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)

    def _partial(self) -> pathlib.Path:
        """Returns the folder of the checkpoint that is being written."""
        assert self._saving is not None
        return next(self._folder.glob(f"{self._saving[0]}.orbax-checkpoint-tmp*"))

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Raises CheckpointError for the errors of a save that failed; tensorstore's are ValueError.

        What it left is removed, but for files still being written then, which the next start removes.
        """
        assert self._saving is not None
        step, size = self._saving
        try:
            yield
            return
        except (OSError, ValueError, ProcessError) as error:
            self._saving, cause = None, error
        free = shutil.disk_usage(self._folder).free
        for partial in self._folder.glob(f"{step}.orbax-checkpoint-tmp*"):
            shutil.rmtree(partial, ignore_errors=True)
        left = saved_steps(self._folder)
        last = f"the last good one is of step {left[-1]}" if left else "there is none yet"
        raise CheckpointError(
            f"the checkpoint of step {step} could not be saved in {self._folder}, where {decimal(free)} are "
            f"free; it takes up to {decimal(size)}; {last}. Make room and continue with --resume. {cause}"
        ) from cause


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): tuple(x.shape) for path, x in leaves}


def save_params(folder: pathlib.Path, params: Any) -> None:
    """Saves parameters alone as the checkpoint of step 0 in `folder`: a run that has not begun.

    Beside the parameters, memory holds about as much again as the largest array takes.
    """
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
    handler = ocp.StandardCheckpointHandler(save_concurrent_gb=largest // 2**30 + 1)
    with ocp.CheckpointManager(folder.absolute(), item_handlers={"params": handler}) as manager:
        manager.save(0, args=ocp.args.Composite(params=ocp.args.StandardSave(params)))
    manifest.write(folder / "0")


class _Manager(ocp.CheckpointManager):
    """Leaves JAX's preemption service, which counts the calls of one caller, to `Interruption`."""

    def reached_preemption(self, step: int) -> bool:
        return False


@dataclasses.dataclass
class _Best(PreservationPolicy):
    """Keeps the checkpoint whose step has the lowest loss."""

    losses: Mapping[int, float]

    def should_preserve(self, checkpoints, *, context) -> Sequence[bool]:
        best = _best([checkpoint.step for checkpoint in checkpoints], self.losses)
        return [checkpoint.step == best for checkpoint in checkpoints]


def _best(steps: Sequence[int], losses: Mapping[int, float]) -> int | None:
    return min((step for step in steps if step in losses), key=lambda step: losses[step], default=None)


def _is_no_orbax_error(record: logging.LogRecord) -> bool:
    """Filters out the errors that orbax logs with their tracebacks: it raises them, too."""
    return record.levelno != logging.ERROR or "orbax" not in record.pathname


def _rest(state: TrainState) -> dict[str, Any]:
    """Returns what a state has besides parameters."""
    rest = state._asdict()
    del rest["params"]
    return rest


def _abstract(tree: Any) -> Any:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def abstract(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None) or sharding)

    return jax.tree.map(abstract, tree)
