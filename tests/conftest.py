"""Shape and dtype annotations are checked in every test; hypothesis draws the same examples every time."""

import gc
import os

import hypothesis
import pytest

# In the environment, for the programs that tests start too, and before JAX reads it.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

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

# What JAX has traced is kept, millions of objects: to look through them often took a tenth of the time.
gc.set_threshold(100_000, 20, 50)


@pytest.fixture(scope="module")
def unoptimized():
    """Spares LLVM's optimization, which takes longer than what it makes faster; XLA's passes run."""
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", False)
