"""The lock of a run's folder: held by one process, named to others; a run that loses its folder ends."""

import contextlib
import errno
import fcntl
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from training.log.metrics import MetricsLog
from training.run.lock import FolderLostError, check_unlocked, locked

ROOT = pathlib.Path(__file__).parents[3]
HOLD = "import pathlib, sys\nfrom training.run.lock import locked\n"
HOLD += "with locked(pathlib.Path(sys.argv[1])): print('locked', flush=True); sys.stdin.read()"


def test_a_lock_ends_with_its_process(tmp_path):
    folder = tmp_path / "new" / "run"
    command = [sys.executable, "-c", HOLD, str(folder)]
    holder = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "locked\n"
    said = f"new/run is in use by process {holder.pid} on {os.uname().nodename} since "
    with pytest.raises(ValueError, match=said), locked(folder):
        pass
    holder.kill()
    holder.communicate()
    for _ in range(2):
        with locked(folder):
            assert (folder / "lock").read_text().startswith(f"process {os.getpid()} on ")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EIO])
def test_a_file_system_without_locks_has_none(tmp_path, monkeypatch, number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)
    other = pytest.raises(OSError, match=os.strerror(number))
    with contextlib.nullcontext() if number == errno.ENOLCK else other, locked(tmp_path):
        pass


def test_a_pipe_in_place_of_the_lock_is_named_and_a_link_is_not_followed(tmp_path):
    os.mkfifo(tmp_path / "lock")
    for take in (check_unlocked, lambda folder: locked(folder).__enter__()):
        with pytest.raises(ValueError, match="lock is not a file: remove it"):
            take(tmp_path)
    (tmp_path / "lock").unlink()
    (tmp_path / "other").write_text("as it was")
    (tmp_path / "lock").symlink_to(tmp_path / "other")
    with pytest.raises(ValueError, match="lock is not a file: remove it"), locked(tmp_path):
        pass
    assert (tmp_path / "other").read_text() == "as it was"


@pytest.mark.parametrize("hard_link", [False, True])
def test_a_file_of_that_name_that_is_no_lock_is_kept(tmp_path, hard_link):
    content = "process 1 on host\n" if hard_link else "my notes\n"
    (tmp_path / "lock").write_text(content)
    if hard_link:
        os.link(tmp_path / "lock", tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="lock is not the lock of a run: move it away"), locked(tmp_path):
        pass
    assert (tmp_path / "lock").read_text() == content


def move(folder, moved):
    folder.rename(moved)


def replace(folder, moved):
    folder.rename(moved)
    shutil.copytree(moved, folder)


def remove(folder, moved):
    shutil.rmtree(folder)


def remove_lock(folder, moved):
    (folder / "lock").unlink()


def replace_lock(folder, moved):
    (folder / "lock").rename(moved)
    shutil.copyfile(moved, folder / "lock")


IN_MOVED = "moved holds metrics.jsonl and the checkpoint of step 20; continue with: python train.py --out "
IN_PLACE = "alone: its file lock was removed .* It holds metrics.jsonl and the checkpoint of step 20; "


@pytest.mark.parametrize(
    ("lose", "said"),
    [
        (move, f"it was moved. .*{IN_MOVED}"),
        (replace, f"it was moved. .*{IN_MOVED}"),
        (remove, "it was removed, or moved out of sight, with all"),
        (remove_lock, IN_PLACE),
        (replace_lock, IN_PLACE),
    ],
)
def test_a_line_is_not_written_to_a_folder_that_was_lost(tmp_path, lose, said):
    folder, moved = tmp_path / "run", tmp_path / "moved"
    (folder / "checkpoints" / "20").mkdir(parents=True)
    with locked(folder) as check_place, MetricsLog(folder / "metrics.jsonl", check_place=check_place) as log:
        log.write(step=1, loss=2.5)
        lose(folder, moved)
        with pytest.raises(FolderLostError, match=f"run is no longer this run's.*{said}"):
            log.write(step=2, loss=2.4)
    found = [path.read_text() for path in tmp_path.rglob("metrics.jsonl")]
    assert set(found) == (set() if lose is remove else {'{"step": 1, "loss": 2.5}\n'})


def test_a_folder_without_checkpoints_says_so(tmp_path):
    with locked(tmp_path / "run") as check_place:
        check_place()
        (tmp_path / "run").rename(tmp_path / "moved")
        with pytest.raises(FolderLostError, match=r"moved holds no checkpoint$"):
            check_place()
        (tmp_path / "moved" / "metrics.jsonl").touch()
        with pytest.raises(FolderLostError, match=r"moved holds metrics\.jsonl and no checkpoint$"):
            check_place()
