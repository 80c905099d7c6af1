"""The training workshop: configuration, data, optimizer, training step, checkpoints, metrics.

It needs the extra `train`; `training.extras` names the extra of every other optional dependency.
"""

from training.extras import check_extra

check_extra("train", "training", "flax", "grain", "optax", "orbax", "rich", "safetensors", "tyro")
