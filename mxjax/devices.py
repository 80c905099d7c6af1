"""Where JAX computes."""

import jax


def on_gpu() -> bool:
    """Returns whether JAX computes on a GPU unless told otherwise."""
    device = jax.config.jax_default_device
    platform = getattr(device, "platform", device) or jax.default_backend()
    return platform in ("gpu", "cuda", "rocm")
