"""Prints policies operand by operand, and recipes of whole runs by their flags, with their sources."""

import argparse
import os
import pathlib
import sys
from collections.abc import Sequence

from mxjax.policy.policy import Gemm
from mxjax.recipes import describe, get_policy, policies, source
from mxjax.recipes.ladder import ladder
from mxjax.recipes.whole_runs import RECIPES
from mxjax.runtime.tables import insert, table


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


def published_table() -> str:
    """Returns every policy but the ladder's as a Markdown table: its three GEMMs, and its source."""
    shown = [name for name in policies() if name not in ladder()]
    rows = [[f"`{name}`", *map(_gemm, get_policy(name).gemms.values()), source(name)] for name in shown]
    return table("policy | Fprop: x, w | Dgrad: dy, w | Wgrad: x, dy | source", rows).replace("---:", "---")


def _gemm(gemm: Gemm) -> str:
    """Returns the operands of a GEMM, once if they are alike, and its rotation."""
    lhs, rhs = str(gemm.lhs), str(gemm.rhs)
    operands = "both " + lhs if lhs == rhs else f"{lhs}, {rhs}"
    return f"{operands}; {gemm.rotation}" if gemm.rotation else operands


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m mxjax.recipes", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="what to print; default: all")
    parser.add_argument("--write", type=pathlib.Path, metavar="PAGE", help="write the table into a page")
    try:
        options = parser.parse_args()
        if options.write is not None:
            page = insert(options.write.read_text(), {"recipes": published_table()})
            options.write.write_text(page)
        else:
            main(options.names)
        sys.stdout.flush()
    except ValueError as error:
        parser.error(str(error))
    except BrokenPipeError:  # the reader, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
