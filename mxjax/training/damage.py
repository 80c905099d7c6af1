"""What is done about checkpoints that are damaged: they are set aside, so that the newest is a whole one."""

import pathlib
import shutil
from collections.abc import Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

from mxjax.training import manifest

_SMALL = 2**16  # bytes; of older checkpoints, only files up to this are read to find damage


def set_aside_damaged(folder: pathlib.Path) -> list[str]:
    """Makes the newest checkpoint in a folder a whole one; returns what there is to say of it.

    Damaged ones are renamed damaged-STEP, except that of an older one whose files are only missing, the
    rest is removed: the run was killed while it removed it. The newest is read in full, older ones only in
    their small files. With several processes the first does this, while the others wait.

    Raises:
      ValueError: there are checkpoints, and all are damaged; nothing is changed then.
    """
    lines, failure = [], ""
    if jax.process_index() == 0:
        try:
            lines = _set_aside_damaged(folder.absolute())
        except ValueError as error:
            failure = str(error)
    if multihost_utils.broadcast_one_to_all(np.array(bool(failure))):
        raise ValueError(failure or f"all checkpoints in {folder} are damaged")
    return lines


def _set_aside_damaged(folder: pathlib.Path) -> list[str]:
    good, removals, renames, damage, lines = None, [], [], [], []
    for step in reversed(saved_steps(folder)):
        path = folder / str(step)
        problems = manifest.problems(path, float("inf") if good is None else _SMALL)
        if not problems:
            good = step if good is None else good
        elif good is not None and set(problems.values()) == {manifest.MISSING}:
            removals.append(path)
            lines.append(f"removed the rest of {path}, whose removal had been interrupted")
        else:
            renames.append((path, _unused(folder / f"damaged-{step}")))
            damage.append(describe_damage(path, problems))
            lines.append(f"{damage[-1]}; renamed it {renames[-1][1].name}")
    if renames and good is None:
        raise ValueError(
            f"no good checkpoint remains in {folder}: {'; '.join(damage[:3])}. "
            "Put a copy back, or start a new run"
        )
    for path in removals:
        shutil.rmtree(path)
    for path, target in renames:
        path.rename(target)
    return [*lines, f"going on from the checkpoint of step {good}"] if renames else lines


def describe_damage(path: pathlib.Path, problems: Mapping[str, str]) -> str:
    """Returns a sentence on what `manifest.problems` found wrong with a checkpoint's folder."""
    name, problem = next(iter(problems.items()))
    more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
    return f"the checkpoint {path} is damaged ({name} {problem}{more})"


def _unused(path: pathlib.Path) -> pathlib.Path:
    number, found = 2, path
    while found.exists():
        number, found = number + 1, path.with_name(f"{path.name}-{number}")
    return found


def saved_steps(folder: pathlib.Path) -> list[int]:
    """Returns the steps of the checkpoints in a folder, whole or not, in ascending order."""
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    return sorted(int(name) for name in names if name.isdigit())
