"""Runs that are killed and go on, in one process and in two: records and states have the bits of a run left
alone."""

import json
import time

import pytest
from support.gpu_runs import EVERY, SMALL, final, finish, kill_at, series, without_times
from support.programs import run_compiled

NOTICED = 75.0
"""Seconds in which a process ends after another was killed: the 60 that are promised, and some to exit."""
KILL = EVERY * 5 // 2  # by then one checkpoint is complete
STATE = """
import json, pathlib, sys, zlib
import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

folder = max(pathlib.Path(sys.argv[1]).glob("checkpoints/[0-9]*"), key=lambda path: int(path.name))
found = {"step": folder.name}
for item in ("params", "rest"):
    with ocp.PyTreeCheckpointer() as checkpointer:
        path = epath.Path(folder / item)
        tree = checkpointer.metadata(path).item_metadata.tree
        how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)  # whatever mesh saved it
        state = checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=how))
    for where, x in jax.tree.leaves_with_path(state):
        found[item + jax.tree_util.keystr(where)] = zlib.crc32(np.ascontiguousarray(x).tobytes())
print(json.dumps(found))
"""


def state(run):
    """Returns the step of the newest checkpoint and a checksum of each of its arrays."""
    found = json.loads(run_compiled(STATE, run).splitlines()[-1])
    assert len(found) > 10
    return found


@pytest.fixture(scope="module")
def whole(programs):
    run = programs.train("whole", *SMALL)
    assert final(run, "eval_loss") < series(run, "loss")[1]
    return run


def test_a_killed_run_repeats_the_bits_of_one_left_alone(programs, whole):
    run = programs.folder / "killed"
    kill_at(programs.begin("killed", *SMALL), run, KILL)
    programs.train("killed", "--resume")
    assert without_times(run) == without_times(whole)
    assert state(run) == state(whole)


def test_after_one_of_two_processes_is_killed_both_go_on(programs, two_gpus):
    flags = [*SMALL, "--mesh", "fsdp=2"]
    killed, whole = programs.folder / "two_killed", programs.folder / "two_whole"
    first, second = programs.begin_two("two_killed", *flags)
    kill_at(second, killed, KILL)
    began = time.monotonic()
    others = programs.begin_two("two_whole", *flags)  # while the first one notices
    assert first.wait(timeout=NOTICED) != 0
    assert time.monotonic() - began < NOTICED
    for process in (*others, *programs.begin_two("two_killed", "--resume", "--mesh", "fsdp=2")):
        finish(process)
    assert without_times(killed) == without_times(whole)
    assert state(killed) == state(whole)
