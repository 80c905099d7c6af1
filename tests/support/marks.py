"""Parameters of tests, of which some run in CI alone, or before a release."""

import pytest


def parametrize(names, *values, slow=(), exhaustive=(), ids=None):
    """Returns `pytest.mark.parametrize` of these values and of those that are marked `slow` or `exhaustive`.

    A value is a tuple where `names` are several.
    """

    def marked(values, mark):
        return [
            pytest.param(*(value if isinstance(names, tuple) else [value]), marks=mark) for value in values
        ]

    values = [*values, *marked(slow, pytest.mark.slow), *marked(exhaustive, pytest.mark.exhaustive)]
    return pytest.mark.parametrize(names, values, ids=ids)
