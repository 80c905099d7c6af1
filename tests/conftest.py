"""Shape and dtype annotations are checked in every test; hypothesis draws the same examples every time."""

import hypothesis
import jax
from jaxtyping import install_import_hook

hypothesis.settings.register_profile("mxjax", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("mxjax")

with install_import_hook(("mxjax", "models"), "beartype.beartype"):
    from mxjax.training.environment import enable_compilation_cache

# Most of the suite's time is compilation: a second run finds it done.
enable_compilation_cache()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
