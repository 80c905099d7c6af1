"""The folder of compiled programs, and errors of paths in one line."""

import errno
import os
import pathlib
import pwd

import jax
import pytest

from training.process.environment import (
    enable_compilation_cache,
    free_space,
    in_one_line,
    input_errors,
    memory_errors,
    path_errors,
)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """Returns a function from environment variables to the folder that is chosen."""
    monkeypatch.chdir(tmp_path)
    chosen = {}
    monkeypatch.setattr(jax.config, "update", lambda name, value: chosen.update({name: value}))

    def choose(**variables):
        for name in ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        chosen.clear()
        enable_compilation_cache()
        return chosen.get("jax_compilation_cache_dir")

    return choose


def test_the_cache_is_in_the_users_cache_folder(cache, tmp_path, monkeypatch):
    """As the XDG Base Directory Specification says: empty and relative paths are ignored."""
    expected = str(tmp_path / "home" / ".cache" / "mxjax")
    for named in ("", "relative", "."):
        assert cache(XDG_CACHE_HOME=named, HOME=tmp_path / "home") == expected
    assert cache(HOME=tmp_path / "home") == expected
    assert cache(XDG_CACHE_HOME=tmp_path / "xdg", HOME="") == str(tmp_path / "xdg" / "mxjax")
    assert {path.name for path in tmp_path.iterdir()} == {"home", "xdg"}
    user = pwd.getpwuid(os.getuid())
    monkeypatch.setattr(
        pwd, "getpwuid", lambda _: pwd.struct_passwd([*user[:5], str(tmp_path / "pw"), user[6]])
    )
    assert cache(HOME="") == cache() == str(tmp_path / "pw" / ".cache" / "mxjax")
    assert cache(JAX_COMPILATION_CACHE_DIR=tmp_path / "jax") == str(tmp_path / "jax")
    found = cache(HOME=tmp_path / "home", JAX_COMPILATION_CACHE_DIR="~/jax")
    assert found == str(tmp_path / "home" / "jax")
    assert cache(JAX_COMPILATION_CACHE_DIR="gs://bucket/cache") is None  # JAX has read it itself


def test_without_a_cache_folder_a_warning_says_so(cache, tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    assert cache(XDG_CACHE_HOME=tmp_path / "file") is None
    assert f"nothing compiled is cached: {tmp_path}/file/mxjax: Not a directory" in capsys.readouterr().err

    def unknown(_):
        raise KeyError("no such user")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert cache() is None
    assert "nothing compiled is cached: there is no home folder" in capsys.readouterr().err


def test_too_little_memory_is_one_line():
    text = "RESOURCE_EXHAUSTED: Out of memory allocating 64401751544 bytes.\nBufferAssignment: ..."
    with pytest.raises(SystemExit) as ended, memory_errors():
        raise jax.errors.JaxRuntimeError(text)
    message = str(ended.value)
    assert ": error: RESOURCE_EXHAUSTED: Out of memory allocating 64401751544 bytes; try a smaller" in message
    assert "\n" not in message
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), memory_errors():
        raise jax.errors.JaxRuntimeError("INTERNAL: RESOURCE_EXHAUSTED elsewhere")


def test_errors_of_paths_are_one_line(tmp_path):
    for number in (errno.EACCES, errno.EROFS, errno.ENAMETOOLONG, errno.ESTALE, errno.EPERM, errno.ENXIO):
        error = OSError(number, os.strerror(number), str(tmp_path))
        said = in_one_line(error)
        assert said == f"{tmp_path}: {os.strerror(number)}"
        for context in (input_errors(), path_errors(pathlib.Path("run"))):
            with pytest.raises(SystemExit) as ended, context:
                raise error
            assert str(ended.value).endswith(f"error: {said}")
    full = OSError(errno.ENOSPC, "No space left on device")
    assert in_one_line(full, tmp_path / "no" / "run").startswith(f"writing to {tmp_path}/no/run, where ")
    assert free_space(tmp_path / "no" / "run").endswith("B")
    with pytest.raises(ConnectionError), path_errors(tmp_path):
        raise ConnectionResetError(errno.ECONNRESET, "reset by another process")
