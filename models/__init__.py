"""Models whose linear layers run through `mxjax.dot`. They need the extra `train`."""

import importlib.util
import sys

_PROGRAM = "models.huggingface"

for _module in ("flax", "rich", "safetensors"):
    if importlib.util.find_spec(_module) is None:
        _message = (
            f"models needs {_module}: in a checkout of mxjax, pip install -e '.[train]' or "
            "uv sync --extra train"
        )
        # `python -m` imports this before the program: sys.argv begins with -m until then.
        if sys.argv[:1] == ["-m"] and _PROGRAM in sys.orig_argv:
            raise SystemExit(f"python -m {_PROGRAM}: error: {_message}")
        raise ImportError(_message)
