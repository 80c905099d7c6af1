"""The lock of a run's folder: held by one process, named to others, and free once that process is dead."""

import errno
import fcntl
import os
import pathlib
import subprocess
import sys

import pytest

from training.run.lock import check_unlocked, locked

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
    if number == errno.ENOLCK:
        with locked(tmp_path):
            pass
    else:
        with pytest.raises(OSError, match=os.strerror(number)), locked(tmp_path):
            pass


def test_a_pipe_in_place_of_the_lock_is_named(tmp_path):
    os.mkfifo(tmp_path / "lock")
    for take in (check_unlocked, lambda folder: locked(folder).__enter__()):
        with pytest.raises(ValueError, match="lock is not a file: remove it"):
            take(tmp_path)


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path):
    (tmp_path / "other").write_text("as it was")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").symlink_to(tmp_path / "other")
    with pytest.raises(ValueError, match="lock is not a file: remove it"), locked(tmp_path / "run"):
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
