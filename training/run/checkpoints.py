"""Checkpoints of a run, by orbax: the whole training state and the position in the data.

A checkpoint is renamed into place once it and its checksums are written, so a run killed at any moment leaves
only complete ones; the next start removes an unfinished one. Random bits need no state of their own: they are
a function of the seed and the step.
"""

import contextlib
import dataclasses
import errno
import logging
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, LatestN, PreservationPolicy
from rich.filesize import decimal

from models import lora
from training.process.environment import FULL, LIMIT, free_space, in_one_line
from training.process.together import ProcessError, together
from training.run import checksums
from training.run.average import restore_average
from training.run.checksums import (
    Shapes,
    check_opens,
    check_saveable,
    describe_damage,
    find_problems,
    saved_shapes,
    saved_steps,
    saved_tree,
    shapes,
)
from training.step import TrainState

Weights = Literal["ema"]
"""Weights of a checkpoint that are not its parameters: the average that --ema keeps."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; earlier ones still exist."""


class _Saving(NamedTuple):
    """A save in progress: its step, size in bytes, and the shapes of its arrays by item and name."""

    step: int
    size: int
    shapes: Mapping[str, Shapes]


class Checkpoints:
    """The checkpoints in a folder, saved in the background. A context manager."""

    def __init__(
        self,
        folder: pathlib.Path,
        keep: int | None = None,
        losses: Mapping[int, float] | None = None,
        check_place: Callable[[], None] = lambda: None,
    ):
        """Opens the folder.

        Args:
          keep: number of newest checkpoints to keep, and remove unfinished ones; None keeps everything.
          losses: evaluation losses by step; the checkpoint with the lowest loss is kept as well.
          check_place: raises an error of its own if the folder is no longer this run's.
        """
        self._folder, self._check_place = folder.absolute(), check_place
        if keep is not None:
            check_saveable(self._folder)
        self.losses = dict(losses or {})  # the training loop adds later evaluations
        self._saving: _Saving | None = None
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy([LatestN(keep), _Best(self.losses)]),
            cleanup_tmp_directories=keep is not None,
            lightweight_initialize=True,  # reads nothing that might be damaged
            enable_async_checkpointing=True,
            async_options=ocp.AsyncOptions(
                post_finalization_callback=self._write_checksums,
                barrier_sync_fn=self._barrier,
                create_directories_asynchronously=False,  # or its threads wait on if it fails
            ),
        )
        self._manager = _Manager(self._folder, options=options)
        logging.getLogger("absl").addFilter(_is_no_orbax_error)  # for good: threads outlive a failed save

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception) -> None:
        try:
            self.wait()
        finally:
            with contextlib.suppress(OSError, ValueError):  # `wait` has already reported it
                self._manager.close()

    @property
    def latest(self) -> int | None:
        """The newest saved step, or None."""
        return self._manager.latest_step()

    @property
    def best(self) -> int | None:
        """The saved step with the lowest loss, or None."""
        return _best(self._manager.all_steps(), self.losses)

    def save(self, state: TrainState, data_position: dict[str, Any]) -> None:
        """Starts saving the state and the position in the data as the checkpoint of the state's step.

        Raises:
          CheckpointError: this save or the previous one failed.
        """
        step = int(state.step)
        if step == self.latest:
            return
        self.wait()
        with together():
            self._check_place()
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state._replace(frozen=None)))
        self._saving = _Saving(step, size, {"params": shapes(state.params), "rest": shapes(_rest(state))})
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
        """Raises CheckpointError if the background save has failed; does not wait for it."""
        if self._saving is not None and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Waits for the background save; raises CheckpointError if it fails."""
        if self._saving is not None:
            with self._errors():
                self._manager.wait_until_finished()
            self._saving = None

    def restore(self, like: TrainState, step: int | None = None) -> tuple[TrainState, dict[str, Any] | None]:
        """Returns a state, with the shapes and dtypes of `like`, and the position in the data.

        For a run that has not begun, see `save_params`, it returns `like` with saved parameters, and None.

        Args:
          step: the checkpoint's step, whose files are checked for damage. Default: the newest, where
            `checksums.set_aside_damaged` has looked for it.
        Raises:
          ValueError: there is no such checkpoint, it is damaged, or it belongs to another model or step.
        """
        if step is not None:
            self._check_files(step)
        step = self.latest if step is None else step
        if step is None:
            raise ValueError(f"no checkpoint in {self._folder}; start a new run")
        if not (self._folder / str(step) / "rest").exists():
            return like._replace(params=self.restore_params(like.params)), None
        with self._reading(step):
            self._check_model(step, like.params)
            self._check_rest(step, like)
            found = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardRestore(_abstract(like.params)),
                    rest=ocp.args.StandardRestore(_abstract(_rest(like))),
                    data=ocp.args.JsonRestore(),
                ),
            )
        state = TrainState(params=found["params"], **found["rest"], frozen=like.frozen)
        if int(state.step) != step:
            raise ValueError(
                f"the checkpoint {self._folder / str(step)} holds the state of step {state.step}; "
                "rename or remove it"
            )
        if found["data"] != {"next_index": step}:
            raise ValueError(
                f"the checkpoint {self._folder / str(step)} holds no position in the data after step "
                f"{step}; rename or remove it"
            )
        return state, found["data"]

    def restore_params(
        self, like: Any, step: int | None = None, weights: Weights | None = None, *, packed: bool = False
    ) -> Any:
        """Returns the parameters alone, or with "ema" their average, from the given step or the newest.

        Weights that are saved in packed MXFP4 are unpacked, or with `packed` stay as `models.lora` has them.

        Raises:
          ValueError: there is no such step, the files of these weights are damaged, it belongs to another
            model, or it has no average; the message lists the other steps.
        """
        steps = self._manager.all_steps()
        if not steps or step not in (None, *steps):
            which = "" if step is None else f" of step {step}"
            raise ValueError(f"no checkpoint{which} in {self._folder}; there are {sorted(steps) or 'none'}")
        step = max(steps) if step is None else step
        self._check_files(step, "params" if weights is None else "")
        with self._reading(step):
            if weights == "ema":
                self._check_model(step, like)
                return restore_average(self._folder, step, _abstract(like))
            packed_layers = lora.packed_layers(saved_tree(self._folder / str(step) / "params"))
            as_saved = lora.packed_like(like, packed_layers)
            self._check_model(step, as_saved)
            args = ocp.args.Composite(params=ocp.args.StandardRestore(_abstract(as_saved)))
            found = self._manager.restore(step, args=args)["params"]
            return found if packed or not packed_layers else lora.unpacked(found)

    def _check_files(self, step: int, item: str = "") -> None:
        """Raises ValueError if a checkpoint's files, or an item's, are damaged; it lists the other steps."""
        folder = self._folder / str(step)
        if problems := find_problems(folder, item=item):
            others = sorted({*self._manager.all_steps()} - {step})
            rest = f"others are {others}" if others else "there is no other checkpoint"
            raise ValueError(f"{describe_damage(folder, problems)}; {rest}")

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Turns what orbax raises into ValueError: its files have their checksums, and others made them."""
        try:
            yield
        except (OSError, ValueError, MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # of many kinds
            said = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(
                f"the checkpoint {self._folder / str(step)} cannot be read ({said}); rename or remove it"
            ) from error

    def _check_model(self, step: int, like: Any) -> None:
        """Raises ValueError unless a checkpoint's parameters have the names and shapes of `like`."""
        folder, wanted = self._folder / str(step), shapes(like)
        saved = saved_shapes(folder / "params")
        if other := sorted(name for name in saved.keys() | wanted if saved.get(name) != wanted.get(name)):
            name = other[0]
            raise ValueError(
                f"checkpoint {folder} belongs to another model: {len(other)} parameters differ; {name} has "
                f"shape {saved.get(name, 'none')} there and {wanted.get(name, 'none')} here. Does it belong "
                "to this run's config.json?"
            )

    def _check_rest(self, step: int, like: TrainState) -> None:
        """Raises ValueError unless a checkpoint's optimizer state has the parts of `like`'s."""
        folder = self._folder / str(step)
        if other := sorted(saved_shapes(folder / "rest").keys() ^ shapes(_rest(like)).keys()):
            raise ValueError(
                f"the optimizer's state in {folder} is of other flags or another version of mxjax: it "
                f"differs in {other[0]}; use that version, or begin a run with --init"
            )

    def _write_checksums(self) -> None:
        """Writes checksums.json; orbax calls this in one process before it renames a checkpoint.

        Raises:
          ValueError: what was written cannot be opened as a checkpoint of the state.
        """
        assert self._saving is not None
        self._check_place()
        folder = self._partial()
        for item, expected in self._saving.shapes.items():
            check_opens(folder / item, expected)
        checksums.write(folder, self._saving.step)

    def _barrier(self, *, key: str, timeout_ms: int) -> None:
        """Waits for all processes in the background; before, each computes checksums of its own files.

        If orbax renames this barrier, or a process fails here, process 0 computes all missing checksums.
        """
        if "async_write_complete" in key:
            with contextlib.suppress(OSError, StopIteration):  # an error would leave the others waiting
                checksums.write_part(self._partial(), jax.process_index())
        ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)

    def _partial(self) -> pathlib.Path:
        assert self._saving is not None
        return next(self._folder.glob(f"{self._saving.step}.orbax-checkpoint-tmp*"))

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns the errors of a failed save into CheckpointError; those of tensorstore are ValueError.

        The unfinished checkpoint is removed; files still being written are removed by the next start.
        """
        assert self._saving is not None
        step, size = self._saving.step, self._saving.size
        try:
            yield
            return
        except (OSError, ValueError, ProcessError) as error:
            self._saving, cause = None, error
        self._check_place()  # before anything is removed
        left: list[int] = []
        with contextlib.suppress(OSError):  # the folder may have become unreadable
            for partial in self._folder.glob(f"{step}.orbax-checkpoint-tmp*"):
                shutil.rmtree(partial, ignore_errors=True)
            left = saved_steps(self._folder)
        last = f"the last good one is of step {left[-1]}" if left else "there is no earlier one"
        failed = f"the checkpoint of step {step} could not be saved in {self._folder}"
        said = " ".join(str(cause).split())
        if isinstance(cause, OSError) and cause.errno not in FULL:
            raise CheckpointError(f"{failed}; {last}. {in_one_line(cause)}") from cause
        if isinstance(cause, OSError) or any(os.strerror(number) in said for number in FULL):
            room = f"where {free_space(self._folder)} are free; it takes up to {decimal(size)}"
            remedy = "Make room and continue with --resume"
            if os.strerror(errno.EFBIG) in said:
                room, remedy = f"it takes up to {decimal(size)}", LIMIT
            message = f"{failed}, {room}; {last}. {remedy}. {said}"
            raise CheckpointError(message) from cause
        remedy = "Check that the folder is in its place and can be written, and continue with --resume"
        raise CheckpointError(f"{failed}; {last}. {remedy}. {said}") from cause


def save_params(folder: pathlib.Path, params: Any) -> None:
    """Saves parameters alone as the checkpoint of step 0 in `folder`, for a run that has not begun.

    Needs memory for the parameters and about one copy of the largest array.

    Raises:
      OSError: the folder cannot be written, or the disk is full.
    """
    check_saveable(folder)
    logging.getLogger("absl").addFilter(_is_no_orbax_error)
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
    handler = ocp.StandardCheckpointHandler(save_concurrent_gb=largest // 2**30 + 1)
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)  # no thread outlives a failure
    try:
        with ocp.CheckpointManager(
            folder.absolute(), options=options, item_handlers={"params": handler}
        ) as manager:
            manager.save(0, args=ocp.args.Composite(params=ocp.args.StandardSave(params)))
    except ValueError as error:  # of tensorstore
        if (full := next((number for number in FULL if os.strerror(number) in str(error)), None)) is None:
            raise
        raise OSError(full, os.strerror(full)) from error
    check_opens(folder / "0" / "params", shapes(params))
    checksums.write(folder / "0", 0)


class _Manager(ocp.CheckpointManager):
    """Leaves JAX's preemption service to `Interruption`: it counts the calls of one caller."""

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
    """Drops what orbax logs about a save that fails: it raises it too, or `check_opens` does."""
    return record.levelno < logging.WARNING or "orbax" not in record.pathname


def _rest(state: TrainState) -> dict[str, Any]:
    rest = state._asdict()
    del rest["params"], rest["frozen"]
    return rest


def _abstract(tree: Any) -> Any:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def abstract(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None) or sharding)

    return jax.tree.map(abstract, tree)
