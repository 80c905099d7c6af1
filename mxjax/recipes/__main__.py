"""Prints policies operand by operand, with their sources: `python -m mxjax.recipes [NAME ...]`."""

import sys
from collections.abc import Sequence

from mxjax.recipes import describe, get_policy, policies, source


def main(names: Sequence[str]) -> None:
    """Prints the policies with these names, or all.

    Raises:
      ValueError: unknown name.
    """
    for name in names or policies():
        lines = describe(get_policy(name)).replace("\n", "\n  ")
        print(f"{name}: {source(name)}\n  {lines}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.exit(str(error))
