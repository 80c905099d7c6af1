"""Optional dependencies: what is missing is named together with the extra that installs it."""

import importlib
import importlib.util
import types


class MissingExtraError(ImportError):
    """An optional dependency is not installed; the message names the extra to install."""


def check_extra(extra: str, purpose: str, *modules: str) -> None:
    """Raises MissingExtraError unless all modules are installed; imports none of them."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(
                f"{purpose} needs {module}: in a checkout of mxjax, pip install -e '.[{extra}]' or "
                f"uv sync --extra {extra}"
            )


def require(extra: str, purpose: str, module: str) -> types.ModuleType:
    """Imports an optional dependency; raises MissingExtraError if it is not installed."""
    check_extra(extra, purpose, module.partition(".")[0])
    return importlib.import_module(module)
