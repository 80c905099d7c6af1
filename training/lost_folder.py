"""The end of a run whose folder is no longer its own: it was moved, removed or replaced, or its lock was.

A run writes by name, so it would go on in the folder of another run that has taken the name.
"""

from training.checkpoint.damaged import saved_steps
from training.metrics import FILE as METRICS
from training.resume import command_to_continue
from training.run_lock import FILE, RunLock


class FolderLostError(RuntimeError):
    """A run's folder is no longer its own; the message says what is kept and where."""


def check_place(lock: RunLock) -> None:
    """Raises FolderLostError unless the lock file still lies in the run's folder, under its name."""
    if lock.is_in_place():
        return
    lost, now = f"{lock.folder} is no longer this run's", lock.folder_now()
    if now is None:
        raise FolderLostError(f"{lost}: it was removed, or moved out of sight, with all that the run saved")
    steps = saved_steps(now / "checkpoints")
    records = f"{METRICS} and " if (now / METRICS).exists() else ""  # it may be in removal
    kept = f"holds {records}no checkpoint"
    if steps:
        kept = f"holds {records}the checkpoint of step {steps[-1]}; continue with: {command_to_continue(now)}"
    if now == lock.folder:
        raise FolderLostError(
            f"{lost} alone: its file {FILE} was removed or replaced, so that another run may write there. "
            f"It {kept}"
        )
    raise FolderLostError(f"{lost}: it was moved. {now} {kept}")
