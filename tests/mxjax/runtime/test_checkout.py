"""The commit on record is git's of the checkout itself, and of no folder around it."""

import subprocess

from mxjax.runtime.checkout import commit


def test_the_commit_is_that_of_the_checkout_and_says_whether_files_differ(tmp_path):
    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")
    assert commit(tmp_path) is None  # nothing is committed
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-q", "-m", "a")
    (tmp_path / "new").touch()
    assert commit(tmp_path) == git("rev-parse", "HEAD")
    (tmp_path / "file").write_text("b")
    assert commit(tmp_path) == f"{git('rev-parse', 'HEAD')}-dirty"
    (tmp_path / "inside").mkdir()
    assert commit(tmp_path / "inside") is None
