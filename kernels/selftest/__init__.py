"""The self-test: does mxjax work on this GPU, and how fast?

    python -m mxjax.kernels.selftest

Needs the wheel alone. docs/rocm.md describes what it does.
"""
