"""Builds for gfx950 in an emulator that this project did not write; needs a copy of tinygrad's repository.

    MXJAX_TINYGRAD=FOLDER pytest -n 0 -m exhaustive tests/kernels/test_foreign.py

FOLDER is a checkout of github.com/tinygrad/tinygrad at a9069c177a9d; its CPU backend compiles with clang.
"""

import json
import os

import pytest
from support.code_objects import EMULATED_ATTENTION, EMULATED_GEMMS, EMULATED_QUANTIZERS, MORE_QUANTIZERS
from support.programs import run_compiled

SNAPSHOT = os.environ.get("MXJAX_TINYGRAD")
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(SNAPSHOT is None, reason="MXJAX_TINYGRAD does not name a checkout of tinygrad"),
]

ATTENTION = [*EMULATED_ATTENTION, "attention_*_1x149x1x2x128_*"]
QUANTIZERS = [*EMULATED_QUANTIZERS, *MORE_QUANTIZERS, "draw_*"]
PATTERNS = [*EMULATED_GEMMS, *QUANTIZERS, *ATTENTION]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns the folder of the builds that an emulator runs in seconds."""
    out = tmp_path_factory.mktemp("builds")
    only = [f"--only={pattern}" for pattern in PATTERNS]
    run_compiled("mxjax.kernels.cases", "--target=gfx950", "--jobs=2", f"--out={out}", *only)
    return out / "gfx950"


@pytest.mark.parametrize("patterns", [EMULATED_GEMMS, QUANTIZERS, ATTENTION])
def test_code_objects_write_what_is_expected(folder, patterns):
    printed = run_compiled("foreign.emulator", SNAPSHOT, folder, *patterns)
    results = [json.loads(line) for line in printed.splitlines()]
    assert len(results) > len(patterns)
    for result in results:
        assert all(result["agree"].values()), result
