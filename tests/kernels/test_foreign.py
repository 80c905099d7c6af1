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
# Where tinygrad departs from AMD's document, which gfx950/ follows.
DEPARTURES = {
    "v_mul_u32_u24_e32": "multiplies more than the low 24 bits",
    "v_mad_u32_u24": "multiplies more than the low 24 bits",
    "v_mad_u64_u32": "writes no carry",
    "v_add_co_u32_e32": "writes carries of lanes that EXEC masks",
    "v_addc_co_u32_e32": "writes carries of lanes that EXEC masks",
    "v_cvt_pk_bf16_f32": "makes NaN zero",
    "v_cvt_u32_f32_e32": "makes NaN the largest number",
    "v_max3_f32": "may return -0 for 0 and -0",
    "v_log_f32_e32": "does not flush subnormal numbers",
    "v_exp_f32_e32": "does not flush subnormal numbers",
    "ds_bpermute_b32": "writes lanes that EXEC masks",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns the folder of the builds that an emulator runs in seconds."""
    out = tmp_path_factory.mktemp("builds")
    only = [f"--only={pattern}" for pattern in PATTERNS]
    run_compiled("mxjax.kernels.cases", "--target=gfx950", "--jobs=2", f"--out={out}", *only)
    return out / "gfx950"


def foreign(folder, module, *patterns):
    """Returns the lines of JSON that a module of foreign/ prints."""
    printed = run_compiled(f"foreign.{module}", SNAPSHOT, folder, *patterns)
    return [json.loads(line) for line in printed.splitlines()]


@pytest.mark.parametrize("patterns", [EMULATED_GEMMS, QUANTIZERS, ATTENTION])
def test_code_objects_write_what_is_expected(folder, patterns):
    results = foreign(folder, "emulator", *patterns)
    assert len(results) > len(patterns)
    for result in results:
        assert all(result["agree"].values()), result


def test_instructions_agree(folder):
    """Every kind of instruction in the builds, with random operands, gives what gfx950/ computes."""
    [result] = foreign(folder, "compare", *PATTERNS)
    assert result["opcodes"] > 150
    assert result["differ"].keys() <= DEPARTURES.keys(), result["differ"]
