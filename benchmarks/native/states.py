"""Compares the newest checkpoints of two runs, all their arrays: a program, because it imports JAX.

python -m benchmarks.native.states RUN OTHER
"""

import json
import pathlib
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath


def newest(run: pathlib.Path) -> int:
    """Returns the step of a run's newest checkpoint."""
    return max(int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdigit())


def arrays(checkpoint: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a checkpoint by name, as numpy's, whatever mesh saved them."""
    found = {}
    for item in ("params", "rest"):
        path = epath.Path(checkpoint / item)
        with ocp.PyTreeCheckpointer() as checkpointer:
            metadata = checkpointer.metadata(path).item_metadata
            how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), metadata.tree)
            tree = checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=how))
        found |= {item + jax.tree_util.keystr(p): np.asarray(x) for p, x in jax.tree.leaves_with_path(tree)}
    return found


def compare(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> dict[str, float]:
    """Returns the number of elements, of those that differ in a bit, and the largest difference.

    A difference is relative to the largest magnitude of its array.
    """
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    differing, largest = 0, 0.0
    for name, x in a.items():
        y = b[name]
        if x.tobytes() != y.tobytes():
            bytes_of = [np.ascontiguousarray(t).reshape(-1, 1).view(np.uint8) for t in (x, y)]
            differing += int((bytes_of[0] != bytes_of[1]).any(axis=1).sum())
            scale = float(np.abs(y).max()) or 1.0
            largest = max(largest, float(np.abs(x.astype(np.float64) - y).max()) / scale)
    elements = sum(x.size for x in a.values())
    return {"elements": elements, "differing_elements": differing, "largest_difference": largest}


def main() -> None:
    """Prints the comparison as JSON."""
    runs = [pathlib.Path(argument) for argument in sys.argv[1:]]
    steps = [newest(run) for run in runs]
    assert steps[0] == steps[1], steps
    a, b = (arrays(run / "checkpoints" / str(step)) for run, step in zip(runs, steps, strict=True))
    print(json.dumps(compare(a, b)))


if __name__ == "__main__":
    main()
