"""Builds for gfx950 in an emulator that this project did not write; needs a copy of tinygrad's repository.

    MXJAX_TINYGRAD=FOLDER pytest -n 0 -m exhaustive tests/kernels/test_foreign.py

FOLDER is a checkout of github.com/tinygrad/tinygrad at a9069c177a9d; its CPU backend compiles with clang.
"""

import json
import os

import pytest
from support import code_objects
from support.programs import run_compiled

SNAPSHOT = os.environ.get("MXJAX_TINYGRAD")
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(SNAPSHOT is None, reason="MXJAX_TINYGRAD does not name a checkout of tinygrad"),
]

ATTENTION = [*code_objects.EMULATED_ATTENTION, *code_objects.MORE_ATTENTION]
QUANTIZERS = [*code_objects.MORE_QUANTIZERS, "draw_*"]
GEMMS = [*code_objects.EMULATED_GEMMS, *code_objects.MORE_GEMMS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns the folder of the builds that an emulator runs in seconds."""
    out = tmp_path_factory.mktemp("builds")
    only = [f"--only={pattern}" for pattern in (*GEMMS, *QUANTIZERS, *ATTENTION)]
    run_compiled("mxjax.kernels.cases", "--target=gfx950", "--jobs=2", f"--out={out}", *only)
    return out / "gfx950"


@pytest.mark.parametrize("patterns", [GEMMS, QUANTIZERS, ATTENTION])
def test_code_objects_write_what_is_expected(folder, patterns):
    printed = run_compiled("foreign.emulator", SNAPSHOT, folder, *patterns)
    results = [json.loads(line) for line in printed.splitlines()]
    assert len(results) > len(patterns)
    for result in results:
        assert all(result["agree"].values()), result
