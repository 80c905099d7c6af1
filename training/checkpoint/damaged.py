"""Damaged checkpoints: they are renamed at the start, so that the newest checkpoint is a good one."""

import contextlib
import pathlib
import shutil
from collections.abc import Iterator, Mapping

import jax

from training import integrity
from training.checkpoint import checksums
from training.files import unused
from training.path_errors import in_one_line
from training.processes import gather, is_first_process

_SMALL = 2**16  # bytes; in older checkpoints only files up to this size are read


def set_aside_damaged(folder: pathlib.Path) -> list[str]:
    """Renames damaged checkpoints to damaged-STEP; returns messages about them.

    If an older one only lacks files, the run was killed while removing it, and its rest is removed. The
    newest is read in full, older ones only in their small files. All processes share the reading; the first
    one renames.

    Raises:
      ValueError: all checkpoints are damaged, and nothing is changed; or they cannot be read or renamed.
      ProcessError: another process raised this error.
    """
    folder = folder.absolute()
    good, damaged = None, {}
    for step in reversed(gather(_file_errors(folder)(lambda: saved_steps(folder)))[0]):
        found = find_problems(folder / str(step), float("inf") if good is None else _SMALL)
        if found:
            damaged[step] = found
        elif good is None:
            good = step
    if not is_first_process():
        return gather(list)[0]
    return gather(_file_errors(folder)(lambda: _set_aside(folder, good, damaged)))[0]


def find_problems(path: pathlib.Path, largest: float = float("inf")) -> dict[str, str]:
    """Returns `checksums.problems` of a checkpoint's folder; each process reads its share of the files.

    Raises:
      ValueError: the files cannot be read.
      ProcessError: another process raised this error.
    """
    share = jax.process_index(), jax.process_count()
    shares = gather(_file_errors(path.parent)(lambda: checksums.problems(path, largest, share)))
    return {name: problem for found in shares for name, problem in found.items()}


def _set_aside(folder: pathlib.Path, good: int | None, damaged: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Removes or renames the damaged checkpoints, given by step; returns messages."""
    removals, renames, damage, messages = [], [], [], []
    for step, problems in damaged.items():
        path = folder / str(step)
        older = good is not None and step < good
        if older and path.is_dir() and set(problems.values()) == {integrity.MISSING}:
            removals.append(path)
            messages.append(f"removed the rest of {path}, whose removal was interrupted")
        else:
            renames.append((path, unused(folder / f"damaged-{step}")))
            damage.append(describe_damage(path, problems))
            messages.append(f"{damage[-1]}; renamed it {renames[-1][1].name}")
    if renames and good is None:
        raise ValueError(
            f"no good checkpoint remains in {folder}: {'; '.join(damage[:3])}. "
            "Put a copy back, or start a new run"
        )
    for path in removals:
        shutil.rmtree(path)
    for path, target in renames:
        path.rename(target)
    return [*messages, f"continuing from the checkpoint of step {good}"] if renames else messages


@contextlib.contextmanager
def _file_errors(folder: pathlib.Path) -> Iterator[None]:
    """Turns an OSError into a ValueError."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"the checkpoints in {folder} cannot be checked for damage: {in_one_line(error, folder)}"
        ) from error


def describe_damage(path: pathlib.Path, problems: Mapping[str, str]) -> str:
    """Returns a sentence on the problems of a checkpoint's folder."""
    name, problem = next(iter(problems.items()))
    more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
    return f"the checkpoint {path} is damaged ({name} {problem}{more})"


def saved_steps(folder: pathlib.Path) -> list[int]:
    """Returns the steps of the checkpoints in a folder, damaged ones included, in ascending order."""
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    return sorted(int(name) for name in names if name.isascii() and name.isdigit() and name == str(int(name)))
