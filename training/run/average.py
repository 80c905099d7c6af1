"""The average of the parameters that --ema keeps, read from the optimizer's state of a checkpoint."""

import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from training.run.checksums import saved_tree


def restore_average(folder: pathlib.Path, step: int, like: Any) -> Any:
    """Returns the average in the checkpoint of a step, and reads nothing else of the optimizer's state.

    Args:
      like: the parameters' shapes, dtypes and shardings.
    Raises:
      ValueError: the checkpoint has no average.
    """
    rest = folder / str(step) / "rest"
    wanted = {_keys(path): leaf for path, leaf in jax.tree.leaves_with_path(like)}

    def of_average(path, _):
        place = _place_in_average(path)
        return ocp.PLACEHOLDER if place is None else wanted[place]

    template = jax.tree.map_with_path(of_average, saved_tree(rest) if rest.exists() else {})
    if all(leaf is ocp.PLACEHOLDER for leaf in jax.tree.leaves(template)):
        raise ValueError(f"--weights ema: {rest.parent} holds no average; --ema keeps one from a run's start")
    restore_args = ocp.checkpoint_utils.construct_restore_args(template)
    args = ocp.args.PyTreeRestore(item=template, restore_args=restore_args)
    # A manager of its own, since one reads an item in one way only.
    with ocp.CheckpointManager(folder) as manager:
        found = manager.restore(step, args=ocp.args.Composite(rest=args))["rest"]
    leaves = {_place_in_average(path): leaf for path, leaf in jax.tree.leaves_with_path(found)}
    return jax.tree.map_with_path(lambda path, _: leaves[_keys(path)], like)


def _keys(path: Any) -> tuple[str, ...]:
    return tuple(str(getattr(part, "key", part)) for part in path)


def _place_in_average(path: Any) -> tuple[str, ...] | None:
    """Returns the keys of a parameter's average below `AverageState.average`; None for other arrays."""
    keys = _keys(path)
    return keys[keys.index("average") + 1 :] if "average" in keys else None
