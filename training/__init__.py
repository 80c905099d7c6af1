"""The training workshop: configuration, data, optimizer, training step, checkpoints, metrics.

It needs the extra `train`; `training.process.start` names the extra of every other optional dependency.
"""

import sys

from training.process.start import MissingExtraError, check_extra

_PROGRAMS = "training.tokenize", "training.huggingface"

try:
    check_extra("train", "training", "flax", "grain", "optax", "orbax", "rich", "safetensors", "tyro")
except MissingExtraError as error:
    # `python -m` imports this before the program: sys.argv begins with -m until then.
    program = next((name for name in _PROGRAMS if name in sys.orig_argv), None)
    if sys.argv[:1] != ["-m"] or program is None:
        raise
    raise SystemExit(f"python -m {program}: error: {error}") from None
