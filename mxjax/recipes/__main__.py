"""Prints policies operand by operand, and recipes of whole runs by their flags, with their sources.

`python -m mxjax.recipes [NAME ...]`
"""

import sys
from collections.abc import Sequence

from mxjax.recipes import describe, get_policy, policies, source
from mxjax.recipes.whole_runs import RECIPES


def main(names: Sequence[str]) -> None:
    """Prints the policies and recipes of whole runs with these names, or all.

    Raises:
      ValueError: unknown name.
    """
    for name in names or (*policies(), *RECIPES):
        if (recipe := RECIPES.get(name)) is not None:
            print(f"{name}, a whole run: {recipe.source}\n  train.py {recipe.flags}")
            continue
        lines = describe(get_policy(name)).replace("\n", "\n  ")
        print(f"{name}: {source(name)}\n  {lines}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.exit(str(error))
