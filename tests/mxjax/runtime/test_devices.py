"""The target of kernels, for which JAX traces apart, and the commit on record."""

import subprocess

import jax
import jax.numpy as jnp

from mxjax.runtime.checkout import commit
from mxjax.runtime.devices import INTERPRETER, Target, current_target, use_target


def test_a_trace_is_of_one_target():
    targets = [Target("cuda", "sm_90"), Target("hip", "gfx950"), INTERPRETER]

    @jax.jit
    def traced():
        return jnp.array([current_target() == target for target in targets])

    here = traced()
    for i, target in enumerate(targets):
        with use_target(target):
            assert traced().tolist() == [i == j for j in range(3)]
    assert (traced() == here).all()


def test_the_commit_is_that_of_the_checkout_and_says_whether_files_differ(tmp_path):
    """And of no folder around it."""

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
