"""JAX's environment: what keeps a program from starting is one line that names the variable."""

import os
import subprocess
import sys

import jax
import pytest

from training.process.environment import start_jax
from training.process.together import join_processes

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
