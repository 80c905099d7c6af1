"""Training on real GPUs: `uv run pytest -m gpu tests/gpu`; elsewhere these tests are skipped."""

import pathlib

import pytest
from support.gpu_runs import Programs, visible_gpus


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == pathlib.Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    if not visible_gpus():
        pytest.skip("needs a GPU")
    started = Programs(tmp_path_factory.mktemp("runs"))
    yield started
    started.end()


@pytest.fixture(scope="module")
def two_gpus(programs):
    if len(visible_gpus()) < 2:
        pytest.skip(f"needs two GPUs, here is {len(visible_gpus())}")
    return ("0", "1")
