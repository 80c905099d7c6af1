"""Shape and dtype annotations are checked in every test; hypothesis draws the same examples every time.

Most of the suite's time is compilation, so LLVM optimizes only what is compared bit for bit with a
definition, where an optimization could show. XLA's own passes always run.
"""

import os
import pathlib

import hypothesis
import pytest

# In the environment, for the programs that tests start too, and before JAX reads it.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax
from jaxtyping import install_import_hook

hypothesis.settings.register_profile("mxjax", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("mxjax")

with install_import_hook(("mxjax", "models"), "beartype.beartype"):
    from mxjax.training.environment import enable_compilation_cache

# A second run, and the programs that tests start, find done what was compiled.
enable_compilation_cache()
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", jax.config.jax_compilation_cache_dir)

# Helpers whose failed assertions are shown with their values, as those of test modules are.
pytest.register_assert_rewrite("dots", "llamas", "quantizer", "tensors")

# How the names of modules begin that LLVM optimizes.
BIT_FOR_BIT = tuple(
    f"test_{name}" for name in ("dot", "hadamard", "philox", "quantize", "rounding", "scales")
)
KERNELS = pathlib.Path(__file__).parent / "kernels"


@pytest.fixture(scope="module", autouse=True)
def optimization(request):
    """Lets LLVM optimize in the modules whose numbers it must not change."""
    before = jax.config.read("jax_disable_most_optimizations")
    wanted = not request.path.stem.startswith(BIT_FOR_BIT) and request.path.parent != KERNELS
    if wanted != before:
        jax.clear_caches()
        jax.config.update("jax_disable_most_optimizations", wanted)
