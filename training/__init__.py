"""The training workshop: configuration, data, optimizer, training step, checkpoints, metrics.

It needs the extra `train`; `training.extras` names the extra of every other optional dependency.
"""

import sys

from training.extras import MissingExtraError, check_extra

_PROGRAM = "training.tokenize"

try:
    check_extra("train", "training", "flax", "grain", "optax", "orbax", "rich", "safetensors", "tyro")
except MissingExtraError as error:
    # `python -m` imports this before the program: sys.argv begins with -m until then.
    if sys.argv[:1] != ["-m"] or _PROGRAM not in sys.orig_argv:
        raise
    raise SystemExit(f"python -m {_PROGRAM}: error: {error}") from None
