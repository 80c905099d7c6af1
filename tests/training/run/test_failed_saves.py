"""Saves that fail: what is said, and that the checkpoint before stays good and no thread waits."""

import shutil
import threading
import time

import pytest
from support.runs import at_step

from training.run.checkpoints import CheckpointError, Checkpoints
from training.run.checksums import saved_steps


def test_a_save_that_will_not_fit_is_not_begun(tmp_path, state, monkeypatch):
    with Checkpoints(tmp_path) as checkpoints:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 5, 5))
        said = r"5 bytes are free; it takes up to 2.. bytes; there is no earlier one"
        with pytest.raises(CheckpointError, match=said):
            checkpoints.save(at_step(state, 1), {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["missing", "incomplete"])
def test_a_checkpoint_that_was_written_but_cannot_be_opened_is_an_error(tmp_path, state, monkeypatch, damage):
    original = Checkpoints._partial

    def partial(self):
        folder = original(self)
        if damage == "missing":  # what orbax leaves below a path that is a pattern
            (folder / "rest" / "manifest.ocdbt").unlink()
        else:
            self._saving.shapes["params"]["more"] = (3,)
        return folder

    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(at_step(state, 1), {})
        checkpoints.wait()
        monkeypatch.setattr(Checkpoints, "_partial", partial)
        checkpoints.save(at_step(state, 2), {})
        with pytest.raises(CheckpointError, match=r"good one is of step 1.*cannot be read: it lacks"):
            checkpoints.wait()
    assert saved_steps(tmp_path) == [1]


def ended(threads):
    """Whether the threads, of which some may not have started yet, end within five seconds."""
    until = time.monotonic() + 5
    while not (over := threads.isdisjoint(threading.enumerate())) and time.monotonic() < until:
        time.sleep(0.01)
    return over


def test_a_save_that_fails_at_once_leaves_no_thread_waiting(tmp_path, state):
    """A file is where the folder was; orbax's threads would wait ten minutes for folders to be made."""
    before = set(threading.enumerate())
    with Checkpoints(tmp_path / "run", keep=1) as checkpoints:
        ended(set(threading.enumerate()) - before)  # orbax looks for remains of other saves
        (tmp_path / "run").rmdir()
        (tmp_path / "run").write_text("a file")
        with pytest.raises(CheckpointError, match=r"step 1 could not .* Not a directory"):
            checkpoints.save(at_step(state, 1), {})
    assert ended({thread for thread in set(threading.enumerate()) - before if not thread.daemon})


class LostError(Exception):
    pass


@pytest.mark.parametrize("late", [False, True])
def test_nothing_is_written_to_a_folder_that_another_run_has_taken(tmp_path, state, monkeypatch, late):
    """The folder is replaced before a save, or while it is written."""
    mine, moved = tmp_path / "mine", tmp_path / "moved"

    def check():
        if (mine / "other").exists():
            raise LostError

    def replace():
        mine.rename(moved)
        (mine / "other").mkdir(parents=True)
        (mine / "2.orbax-checkpoint-tmp").mkdir()  # another run saves there

    def write_checksums(self):
        if self._saving.step == 2:
            replace()
        original(self)

    original = Checkpoints._write_checksums
    if late:
        monkeypatch.setattr(Checkpoints, "_write_checksums", write_checksums)
    with Checkpoints(mine, keep=1, check_place=check) as checkpoints:

        def save_at(step):
            checkpoints.save(at_step(state, step), {})
            checkpoints.wait()

        save_at(1)
        if not late:
            replace()
        with pytest.raises(LostError):
            save_at(2)
    assert sorted(path.name for path in mine.iterdir()) == ["2.orbax-checkpoint-tmp", "other"]
    assert saved_steps(moved) == [1]
