"""The compile server compiles the kernels that its caller would, which compiles them itself if it is gone."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.programs import run_compiled

from mxjax.kernels import compile_client, lowering
from mxjax.kernels.compile_client import CompileServer
from mxjax.kernels.matmul.carry import carry_kernel
from training import startup

LOWER = """
import hashlib, json, os, sys
from training import startup

startup._GPU_DRIVERS, startup._LEAST_CORES = ("/",), 1
platforms = os.environ.pop("JAX_PLATFORMS")
startup.start_compile_server()
server = startup.compile_server
os.environ["JAX_PLATFORMS"] = platforms

import jax
import jax.numpy as jnp
from triton.compiler import ASTSource
from mxjax.devices import Target, use_target
from mxjax.kernels.compile_client import CompileServer
from mxjax.kernels.lowering import use_compile_server
from mxjax.kernels.matmul.carry import carry_operand

use_compile_server(CompileServer(server))
here, make_ir = [], ASTSource.make_ir
ASTSource.make_ir = lambda self, *rest: here.append(self.fn.__name__) or make_ir(self, *rest)
target = Target("cuda", "sm_90")

def lower(*carriers):
    def carry(elements, scales):
        return [carry_operand(elements, scales, carrier, target) for carrier in carriers]

    with use_target(target):
        arrays = jax.ShapeDtypeStruct((1, 64, 32), jnp.uint8), jax.ShapeDtypeStruct((1, 64, 2), jnp.uint8)
        text = jax.jit(carry).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
        return hashlib.sha256(text.encode()).hexdigest()

if sys.argv[1] == "first":
    server.kill()
programs = [lower("e4m3")]
if sys.argv[1] == "second":
    server.kill()
programs += [lower("e4m3", "e5m2")]
if sys.argv[1] == "never":
    server.stdin.close()
    server.wait(60)
print(json.dumps({"here": here, "programs": programs, "status": server.poll()}))
"""


@pytest.mark.slow
def test_the_server_compiles_the_same_kernels(tmp_path):
    def lower(killed):
        return json.loads(run_compiled(LOWER, killed, TRITON_CACHE_DIR=str(tmp_path / killed)))

    alone = lower("first")
    assert alone["here"] == ["carry_kernel"] * 2
    served = lower("never")
    assert served == {"here": [], "programs": alone["programs"], "status": 0}
    half = lower("second")
    assert half["here"] == ["carry_kernel"]
    assert half["programs"] == alone["programs"]


SLEEPS = """
import time
from mxjax.kernels.compile_server import serve

serve(lambda *job: time.sleep(3))
"""


@pytest.mark.slow
def test_a_caller_waits_neither_for_a_dead_server_nor_for_ever(monkeypatch):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", SLEEPS], **pipes)
    server, jobs = CompileServer(process), [(carry_kernel, i) for i in range(3)]
    monkeypatch.setattr(compile_client, "PATIENCE", 0.01)
    server.begin(jobs[:1])
    server.wait(jobs[0])
    assert not server._done[jobs[0]].is_set()
    monkeypatch.setattr(compile_client, "PATIENCE", 60.0)
    server.wait(jobs[0])
    server.begin(jobs[1:2])
    process.kill()
    server.wait(jobs[1])
    assert process.wait() == -signal.SIGKILL
    server.begin(jobs[2:])
    server.wait(jobs[2])
    assert process.stdin.closed
    assert all(done.is_set() for done in server._done.values())
    process.stdout.close()


@pytest.mark.parametrize(
    ("drivers", "least_cores", "platforms"),
    [((os.devnull,), 10_000, ""), (("/no/driver",), 1, ""), ((os.devnull,), 1, "cpu")],
)
def test_no_server_starts_without_a_gpu_or_cores(monkeypatch, drivers, least_cores, platforms):
    monkeypatch.setattr(startup, "_GPU_DRIVERS", drivers)
    monkeypatch.setattr(startup, "_LEAST_CORES", least_cores)
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    startup.start_compile_server()
    assert startup.compile_server is None


def test_two_threads_that_lower_a_kernel_compile_it_once(monkeypatch):
    class Pool:
        def submit(self, function, job):
            time.sleep(0.1)
            return object()

    monkeypatch.setattr(lowering, "_pool", Pool)
    job = (object(), ("float32",), "cuda", "sm_90", (), ())
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: lowering.start_compiling(*job), range(2))
    assert first is second
