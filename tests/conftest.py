"""Annotations are checked, implicit promotion is refused, and hypothesis always draws the same examples."""

import gc
import os
import pathlib
import sys

# Where Python may not write compiled modules, each of some hundred programs would compile thousands.
if sys.dont_write_bytecode:
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(pathlib.Path(__file__).parents[1] / ".pytest_cache" / "pycache")
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": sys.pycache_prefix}

import hypothesis
import pytest
from support.gpu import HAS_GPU

# Triton reads it when kernels are imported, which tests outside of tests/kernels do too.
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
else:  # pytest-xdist's processes share the GPUs
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# In the environment, for the programs that tests start too, and before JAX reads it.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
# Instructions that name no lines of Python are lowered, hashed and compiled in 0.95 of the time.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# XLA's older emitter for CPUs compiles in two thirds of the time, undivided programs in 0.9 of that, and with
# LLVM's first level of optimization, after which they run as fast, in 0.7 of that.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
    "--xla_cpu_parallel_codegen_split_count=1 --xla_backend_optimization_level=1",
)

import jax
from jaxtyping import install_import_hook

hypothesis.settings.register_profile("mxjax", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("mxjax")

with install_import_hook(("mxjax", "models", "training", "analysis"), "beartype.beartype"):
    from training.process.environment import enable_compilation_cache

# A second run, and the programs that tests start, find done what was compiled.
enable_compilation_cache()
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", jax.config.jax_compilation_cache_dir)

# Helpers whose failed assertions are shown with their values, as those of test modules are.
pytest.register_assert_rewrite(*(f"support.{name}" for name in ("dots", "llamas", "quantizer", "tensors")))

# What JAX has traced is kept, millions of objects: to look through them often took a tenth of the time.
gc.set_threshold(100_000, 20, 50)


# How the names begin of modules that LLVM optimizes: what is compared bit for bit with a definition or with a
# program that a test starts, and what trains for many steps. Elsewhere that takes longer than it saves.
BIT_FOR_BIT = ("array", "hadamard", "philox", "quantize", "rounding", "scales")
RUNS = ("every_recipe", "faults", "mlperf", "megatron")
OPTIMIZED = tuple(f"test_{name}" for name in BIT_FOR_BIT + RUNS)
KERNELS = pathlib.Path(__file__).parent / "kernels"
# How the names begin of the library's test modules that differentiate a Llama.
THROUGH_ATTENTION = ("test_layers", "test_remat", "test_rocm_programs", "test_selftest", "test_bench")


# Modules whose tests take longest: begun first, so that pytest-xdist's processes end together.
LONGEST = tuple(
    f"test_{name}"
    for name in (
        *("mesh", "faults", "compile", "gfx950", "lowering", "remat", "sharding"),
        *("every", "versions", "package", "readme", "train_resuming", "memory", "architectures"),
    )
)


def pytest_cmdline_main(config):
    """Names files that are not there: pytest-xdist's processes end without saying so."""
    for argument in [] if config.option.pyargs else config.args:
        if not (config.invocation_params.dir / argument.partition("::")[0]).exists():
            raise pytest.UsageError(f"file or directory not found: {argument}")


def pytest_collection_modifyitems(items):
    """Begins with the longest; brings together what LLVM optimizes, since a change clears JAX's caches."""
    items.sort(key=lambda item: (not item.path.stem.startswith(LONGEST), optimized(item.path)))


def optimized(path):
    """Returns whether LLVM optimizes a module's programs. Kernels are interpreted."""
    return KERNELS not in path.parents and path.stem.startswith(OPTIMIZED)


@pytest.fixture(scope="module", autouse=True)
def optimization(request):
    """Whether LLVM optimizes; XLA's own passes always run."""
    spared = not optimized(request.path)
    if spared != jax.config.read("jax_disable_most_optimizations"):
        jax.clear_caches()
        jax.config.update("jax_disable_most_optimizations", spared)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Text to train on."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"line {i}: the square is {i * i}\n" for i in range(2000)))
    return path


@pytest.fixture(autouse=True)
def strict_promotion(request):
    """Makes JAX refuse operations on arrays of different ranks and, in the library's tests, dtypes.

    Elsewhere `jax.nn.dot_product_attention` in bfloat16, differentiated, and optax promote dtypes themselves.
    Programs, examples and benchmarks run as their users run them.
    """
    library = not {KERNELS, KERNELS.parent / "mxjax"}.isdisjoint(request.path.parents)
    strict = library and not request.path.stem.startswith(THROUGH_ATTENTION)
    ranks = (
        "allow" if request.path.parent.name == "programs" or request.path.stem == "test_bench" else "raise"
    )
    with jax.numpy_dtype_promotion("strict" if strict else "standard"), jax.numpy_rank_promotion(ranks):
        yield
