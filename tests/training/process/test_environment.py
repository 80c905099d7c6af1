"""JAX's environment, the folder of compiled programs and errors of paths: one line says what is wrong."""

import errno
import os
import pathlib
import pwd
import subprocess
import sys

import jax
import pytest

from training.process.environment import (
    enable_compilation_cache,
    free_space,
    in_one_line,
    input_errors,
    memory_errors,
    path_errors,
    start_jax,
)
from training.process.together import join_processes


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
    assert in_one_line(full).startswith("writing: No space left on device. Make room")
    large = OSError(errno.EFBIG, "File too large")
    assert "ulimit -f, and run it again, train.py with --resume" in in_one_line(large)
    copying = OSError(errno.ENOSPC, "No space left on device", "from", None, str(tmp_path))
    assert in_one_line(copying).startswith(f"writing to {tmp_path}, where ")
    with pytest.raises(SystemExit, match=f"writing to {tmp_path}, where "), input_errors(tmp_path):
        raise full
    with pytest.raises(ConnectionError), path_errors(tmp_path):
        raise ConnectionResetError(errno.ECONNRESET, "reset by another process")


START = """
import jax
from jax._src import xla_bridge
from training.process.environment import start_jax

def without_driver():
    raise RuntimeError("no driver")

xla_bridge.register_backend_factory("accelerator", without_driver, priority=500, fail_quietly=False)
for platforms in ("cuda", "CPU", ""):
    jax.config.update("jax_platforms", platforms)
    try:
        start_jax()
    except ValueError as error:
        print(error)
"""


def test_devices_that_are_not_there_are_one_line():
    ended = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, check=True)
    cuda, cpu, plugin = ended.stdout.splitlines()
    assert cuda.startswith("JAX_PLATFORMS=cuda: JAX has no such devices here; install the extra")
    assert cpu.startswith(
        "JAX_PLATFORMS=CPU: JAX has no such devices here (Unable to initialize backend 'CPU"
    )
    assert plugin.startswith("Unable to initialize backend 'accelerator': no driver (you may need to unins")


def test_a_value_that_no_variable_of_jax_has_is_one_line():
    code = "from training.process.start import prepare_process; prepare_process()"
    environment = os.environ | {"JAX_ENABLE_X64": "maybe"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert ended.returncode == 1
    assert ended.stderr == "-c: error: invalid truth value 'maybe' for environment 'JAX_ENABLE_X64'\n"


MESH = """
import sys
import jax
from training.command_line import parse
from training.process.environment import start_jax
from training.sharding import make_mesh

config = parse(sys.argv[1:])
start_jax(config.devices)
print({name: size for name, size in make_mesh(config.mesh).shape.items() if size > 1})
jax.local_devices = lambda: [type("Device", (), {"platform": "gpu"})] * 2
try:
    start_jax(config.devices)
except ValueError as error:
    print(error)
"""


def test_virtual_devices_of_a_cpu():
    words = [sys.executable, "-c", MESH, "--devices", "6", "--mesh", "data=3,tensor=2"]
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}  # the flag wins
    ended = subprocess.run(words, capture_output=True, text=True, env=environment, check=True)
    mesh, refused = ended.stdout.splitlines()
    assert mesh == "{'data': 3, 'tensor': 2}"
    assert refused.startswith(
        "--devices 6 makes virtual devices of a CPU, and JAX has 2 of platform gpu: set"
    )


@pytest.mark.parametrize(
    ("setting", "value"), [(jax.transfer_guard, "disallow"), (jax.numpy_dtype_promotion, "strict")]
)
def test_settings_under_which_jax_itself_raises_are_named(setting, value):
    said = f"JAX_{setting.__name__.upper()}={value}: functions of JAX and optax do not run so; unset it"
    with setting(value), pytest.raises(ValueError, match=said):
        start_jax()
    start_jax()


@pytest.mark.parametrize(
    ("count", "index", "said"),
    [
        ("one", "0", "JAX_NUM_PROCESSES must be a number of processes, got 'one'"),
        ("0", "0", "JAX_NUM_PROCESSES must be a number of processes, got '0'"),
        ("2", "2", "JAX_PROCESS_ID must be from 0 to 1, got '2'"),
        ("2", "first", "JAX_PROCESS_ID must be from 0 to 1, got 'first'"),
    ],
)
def test_the_variable_that_is_wrong_is_named(monkeypatch, count, index, said):
    given = {"JAX_COORDINATOR_ADDRESS": "localhost:1", "JAX_NUM_PROCESSES": count, "JAX_PROCESS_ID": index}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"--distributed: {said}"):
        join_processes()
