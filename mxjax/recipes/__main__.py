"""Prints policies operand by operand, and recipes of whole runs by their flags, with their sources."""

import argparse
import os
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
    parser = argparse.ArgumentParser("python -m mxjax.recipes", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="what to print; default: all")
    try:
        main(parser.parse_args().names)
        sys.stdout.flush()
    except ValueError as error:
        parser.error(str(error))
    except BrokenPipeError:  # the reader, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
