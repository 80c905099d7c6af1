"""Triton's knobs while kernels are compiled. They belong to the process; threads compile kernels."""

import contextlib
import threading
from collections.abc import Iterator

SETTINGS: dict[str, dict[str, bool]] = {"cuda": {}, "hip": {"use_block_pingpong": False}}
"""Triton's AMD knobs with which every kernel of a backend is compiled, whatever the environment says.

In Triton 3.9's ping-pong schedule, waves of a 256x256x256 GEMM on gfx950 pass a barrier with a read of LDS
outstanding. Other waves may then load into the buffer that is being read. docs/lowering.md says more.
"""

_changed = threading.Condition()
_users = 0  # compilations that run now
_current: tuple[str, bool] | None = None  # the backend and line_info that all of them have
_scopes = contextlib.ExitStack()


@contextlib.contextmanager
def compiler_knobs(backend: str, line_info: bool) -> Iterator[None]:
    """A context in which Triton's knobs are set; compilations that need others wait.

    Args:
      line_info: whether the code names the lines of its source.
    """
    global _users, _current
    with _changed:
        _changed.wait_for(lambda: not _users or _current == (backend, line_info))
        if not _users:
            _set(backend, line_info)
            _current = backend, line_info
        _users += 1
    try:
        yield
    finally:
        with _changed:
            _users -= 1
            if not _users:
                _scopes.close()
                _changed.notify_all()


def _set(backend: str, line_info: bool) -> None:
    from triton import knobs

    _scopes.enter_context(knobs.compilation.scope())
    _scopes.enter_context(knobs.amd.scope())
    knobs.compilation.disable_line_info = not line_info
    for name, value in SETTINGS[backend].items():
        setattr(knobs.amd, name, value)
