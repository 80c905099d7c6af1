"""Without a GPU the kernels run in Triton's interpreter, which tests/conftest.py chooses."""

import pathlib

import pytest
from support.gpu import HAS_GPU

# How the names of modules begin whose tests run on a GPU too.
_NAMES = "attention carry draws fp4_gemm fp8_matmul grouped products quantiles quantize"
NATIVE = tuple(f"test_{name}" for name in _NAMES.split())


def pytest_collection_modifyitems(items):
    for item in items:
        if pathlib.Path(__file__).parent in item.path.parents and item.path.stem.startswith(NATIVE):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="module", autouse=True)
def kernels_run():
    """Runs kernels on the GPU, or without one in the interpreter."""
    if HAS_GPU:
        yield
        return
    from support.interpreter import compute_once, convert_exactly, reduce_slices, replace_once

    from mxjax.runtime.devices import INTERPRETER, use_target

    replace_once()
    compute_once()
    reduce_slices()
    convert_exactly()
    with use_target(INTERPRETER):
        yield


@pytest.fixture(scope="module")
def on_hopper(kernels_run):
    """Runs kernels as on Hopper: without one in the interpreter, with `support.ptx` for inline assembly."""
    from mxjax.runtime.devices import INTERPRETER, Target, current_target, use_target

    hopper = Target("cuda", "sm_90")
    if current_target() != INTERPRETER:
        if current_target() != hopper:
            pytest.skip("a kernel for Hopper")
        yield
        return
    import triton.language as tl
    from support import ptx

    with pytest.MonkeyPatch.context() as patch, use_target(hopper):
        patch.setattr(tl, "inline_asm_elementwise", ptx.inline_asm_elementwise)
        yield


@pytest.fixture(scope="session")
def builds(tmp_path_factory):
    """Returns the folder of the kernels that tests compile ahead of time."""
    from support.code_objects import build_once

    return build_once(tmp_path_factory)


@pytest.fixture(scope="session")
def more_builds(tmp_path_factory):
    """Returns the folder of the kernels that only the exhaustive tests compile."""
    from support.code_objects import MORE_BUILDS, build_once

    return build_once(tmp_path_factory, "more-builds", MORE_BUILDS)
