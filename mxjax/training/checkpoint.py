"""Checkpoints of a run: the whole training state and the position in the data, by orbax."""

import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from mxjax.training.step import TrainState


class Checkpoints:
    """The checkpoints in a folder; saving goes on in the background. A context manager."""

    def __init__(self, folder: pathlib.Path, keep: int | None = None):
        """Opens the folder; of more than `keep` checkpoints the oldest are removed."""
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception) -> None:
        self._manager.close()  # waits for what is being saved

    @property
    def latest(self) -> int | None:
        """The newest step saved, or None."""
        return self._manager.latest_step()

    def save(self, state: TrainState, data_position: dict[str, Any]) -> None:
        """Starts saving the state, and where the data stands, as the checkpoint of the state's step."""
        step = int(state.step)
        if step == self.latest:
            return
        rest = {"step": state.step, "opt_state": state.opt_state, "finite": state.finite}
        self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(state.params),
                rest=ocp.args.StandardSave(rest),
                data=ocp.args.JsonSave(data_position),
            ),
        )

    def restore(self, like: TrainState) -> tuple[TrainState, dict[str, Any] | None]:
        """Returns the newest state, with the shapes and dtypes of `like`, and the position in the data.

        Of a run that has not begun, see `save_params`, it is `like` with the parameters saved, and None.

        Raises:
          ValueError: there is no checkpoint.
        """
        if self.latest is None:
            raise ValueError(f"no checkpoint in {self._manager.directory}; start a new run")
        if not (pathlib.Path(self._manager.directory) / str(self.latest) / "rest").exists():
            return like._replace(params=self.restore_params(like.params)), None
        rest = {"step": like.step, "opt_state": like.opt_state, "finite": like.finite}
        found = self._manager.restore(
            self.latest,
            args=ocp.args.Composite(
                params=ocp.args.StandardRestore(_abstract(like.params)),
                rest=ocp.args.StandardRestore(_abstract(rest)),
                data=ocp.args.JsonRestore(),
            ),
        )
        return TrainState(params=found["params"], **found["rest"]), found["data"]

    def restore_params(self, like: Any, step: int | None = None) -> Any:
        """Returns the parameters alone, of the newest step or the one named.

        Raises:
          ValueError: no such step; the message lists those there are.
        """
        steps = self._manager.all_steps()
        if not steps or step not in (None, *steps):
            raise ValueError(f"no checkpoint of step {step}; there are {sorted(steps) or 'none'}")
        args = ocp.args.Composite(params=ocp.args.StandardRestore(_abstract(like)))
        return self._manager.restore(self.latest if step is None else step, args=args)["params"]


def save_params(folder: pathlib.Path, params: Any) -> None:
    """Saves parameters alone as the checkpoint of step 0 in `folder`: a run that has not begun.

    Beside the parameters, memory holds about as much again as the largest array takes.
    """
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
    handler = ocp.StandardCheckpointHandler(save_concurrent_gb=largest // 2**30 + 1)
    with ocp.CheckpointManager(folder.absolute(), item_handlers={"params": handler}) as manager:
        manager.save(0, args=ocp.args.Composite(params=ocp.args.StandardSave(params)))


def _abstract(tree: Any) -> Any:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def abstract(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None) or sharding)

    return jax.tree.map(abstract, tree)
