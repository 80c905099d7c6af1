"""The self-test: does mxjax work on this GPU, and how fast?

    python -m mxjax.kernels.selftest

Needs the wheel alone. docs/mi355x.md describes what it does.
"""
