"""The commit of the checkout from which mxjax runs, for records."""

import pathlib
import subprocess

_ROOT = pathlib.Path(__file__).parents[2]


def commit(root: pathlib.Path = _ROOT) -> str | None:
    """Returns the commit of a checkout, with "-dirty" if tracked files differ from it; None without git.

    A folder that merely lies within a checkout, as an environment with mxjax installed does, has none.
    """
    if not (root / ".git").exists():
        return None
    try:
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
        return _git(root, "rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(root: pathlib.Path, *arguments: str) -> str:
    # Without locks, since another git may be at work there; `describe --dirty` would lock all the same.
    command = ["git", "--no-optional-locks", *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()
