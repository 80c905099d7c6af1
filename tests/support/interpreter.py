"""Triton's interpreter without what it does over and over.

At each call from one kernel function to another, a hundred times a program, it replaces the functions of
`triton.language` by its own. They are replaced already: a launch begins so, and ends by restoring them.
"""

import functools
import inspect

import triton.language as tl
from triton.runtime import interpreter


def replace_once() -> None:
    """Makes calls within a launch find Triton's functions as its beginning left them."""
    if not hasattr(interpreter._patch_lang, "__wrapped__"):
        interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)


def _once_a_launch(patch_lang):
    """Returns `_patch_lang` for launches one after the other, as those of `mxjax.kernels.launch` are."""
    seen: dict[int, set[int]] = {}  # the modules of Triton's that a function's module sees
    replaced: set[int] = set()
    launch = None

    @functools.wraps(patch_lang)
    def patch(function):
        nonlocal launch
        key = id(function.__globals__)
        if key not in seen:
            modules = [value for value in function.__globals__.values() if inspect.ismodule(value)]
            seen[key] = {id(module) for module in modules if module in (tl, tl.core)}
        if launch is not None and seen[key] <= replaced:
            return None
        scope = patch_lang(function)
        replaced.update(seen[key])
        if launch is None:
            launch, restore = scope, scope.restore

            def end():
                nonlocal launch
                launch = None
                replaced.clear()
                restore()

            scope.restore = end
        else:
            launch._changes += scope._changes
        return scope

    return patch
