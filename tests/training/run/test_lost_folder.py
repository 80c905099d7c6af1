"""A run whose folder is moved, removed or replaced, or loses its lock, says what is kept and ends."""

import shutil

import pytest

from training.log.metrics import MetricsLog
from training.run.lock import FolderLostError, check_place, locked


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
    with (
        locked(folder) as lock,
        MetricsLog(folder / "metrics.jsonl", check_place=lambda: check_place(lock)) as log,
    ):
        log.write(step=1, loss=2.5)
        lose(folder, moved)
        with pytest.raises(FolderLostError, match=f"run is no longer this run's.*{said}"):
            log.write(step=2, loss=2.4)
    found = [path.read_text() for path in tmp_path.rglob("metrics.jsonl")]
    assert set(found) == (set() if lose is remove else {'{"step": 1, "loss": 2.5}\n'})


def test_a_folder_without_checkpoints_says_so(tmp_path):
    with locked(tmp_path / "run") as lock:
        check_place(lock)
        (tmp_path / "run").rename(tmp_path / "moved")
        with pytest.raises(FolderLostError, match=r"moved holds no checkpoint$"):
            check_place(lock)
        (tmp_path / "moved" / "metrics.jsonl").touch()
        with pytest.raises(FolderLostError, match=r"moved holds metrics\.jsonl and no checkpoint$"):
            check_place(lock)
