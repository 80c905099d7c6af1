"""Models whose linear layers run through `mxjax.dot`. They need the extra `train`."""

import importlib.util

for _module in ("flax", "rich", "safetensors"):
    if importlib.util.find_spec(_module) is None:
        raise ImportError(
            f"models needs {_module}: in a checkout of mxjax, pip install -e '.[train]' or "
            "uv sync --extra train"
        )
