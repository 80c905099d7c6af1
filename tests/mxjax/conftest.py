"""The library's tests forbid implicit dtype and rank promotion."""

import jax
import pytest

# Their Llamas differentiate `jax.nn.dot_product_attention` in bfloat16, which promotes dtypes itself.
THROUGH_ATTENTION = ("test_layer_stats", "test_remat")


@pytest.fixture(autouse=True)
def strict_promotion(request):
    """Makes JAX refuse operations on different dtypes or ranks."""
    dtypes = "standard" if request.path.stem in THROUGH_ATTENTION else "strict"
    with jax.numpy_dtype_promotion(dtypes), jax.numpy_rank_promotion("raise"):
        yield
