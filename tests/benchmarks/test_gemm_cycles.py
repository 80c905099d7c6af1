"""The model of cycles in paper_models/gemm_cycles.py by hand, and its table in the document."""

import json
import pathlib

import pytest

from benchmarks import markdown
from benchmarks.paper_models import gemm_cycles
from benchmarks.paper_models.gemm_cycles import (
    Step,
    loop_steps,
    matrix_cycles,
    pass_cycles,
    tile_share,
    unrolled,
)
from mxjax.kernels.matmul.tiles import Tiles

DOCUMENT = (pathlib.Path(__file__).parents[2] / "docs" / "gemm-schedule.md").read_text()
LISTING = """
.LBB0_1:
	s_waitcnt vmcnt(2) lgkmcnt(0)
	s_barrier
	buffer_load_dwordx4 v1, s[8:11], 0 offen lds
	buffer_load_dword v1, s[8:11], 0 offen lds
	ds_read_b128 v[0:3], v9 offset:16
	ds_read2st64_b32 v[4:5], v9 offset1:2
	v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[16:19], v[20:23], v[0:3], v1, v2 cbsz:4
	v_add_u32_e32 v0, v1, v2 ; a comment
	s_cbranch_scc1 .LBB0_1
	s_endpgm
.Lfunc_end0:
"""
MATRIX, WAIT = Step("matrix"), Step("wait", waits=(("vmcnt", 0), ("lgkmcnt", 0)))


def test_a_loop_is_read():
    assert loop_steps(LISTING) == [
        Step("wait", waits=(("vmcnt", 2), ("lgkmcnt", 0))),
        Step("barrier"),
        Step("load", 1024),
        Step("load", 256),
        Step("lds", 1024),
        Step("lds", 512),
        MATRIX,
        Step("vector"),
        Step("scalar"),
    ]


@pytest.mark.parametrize(
    ("steps", "warps", "cycles"),
    [
        ([MATRIX] * 10, 4, 160),  # one wave a SIMD
        ([MATRIX] * 10, 8, 320),  # two share it
        ([Step("scalar")] * 10, 8, 40),
        ([MATRIX, Step("scalar"), Step("scalar"), Step("scalar")], 4, 16),  # as long as the matrix cores take
        ([Step("load", 1024), WAIT], 1, 16 + 800 + 4),
        ([Step("lds", 1024), WAIT, MATRIX], 1, 4 + 128 + 4 + 4),
        ([Step("load", 6400), Step("wait", waits=(("vmcnt", 3),)), Step("barrier")], 4, 400),  # in one queue
    ],
)
def test_cycles_by_hand(steps, warps, cycles):
    assert pass_cycles(steps, warps, 800) == cycles


def test_ping_pong_runs_half_of_the_waves_a_barrier_behind():
    """While half of the waves multiply, the others wait for memory, and each pass takes both in turn."""
    steps = [Step("load", 64), WAIT, Step("barrier"), *[MATRIX] * 50, Step("barrier")]
    together, apart = (pass_cycles(steps, 8, 800, pingpong=p) for p in (False, True))
    assert together == pytest.approx(800 + 1600, rel=0.02)
    assert apart == pytest.approx(2 * 800, rel=0.02)


def test_shares_of_the_peak_by_hand():
    tiles = Tiles(256, 256, 256, warps=8, stages=2, cost=1.0)
    assert matrix_cycles(tiles) == 2048
    assert [unrolled([MATRIX, WAIT] * n, tiles) for n in (64, 128)] == [1, 2]
    passes, ends = 4096 / 256, 800 + 256 * 256 * 2 / 64
    assert tile_share(tiles, 3000, 800) == pytest.approx(passes * 2048 / (passes * 3000 + ends))


def test_the_document_holds_the_table():
    found = json.loads(gemm_cycles.RESULTS.read_text())
    assert [f["name"] for f in found] == list(gemm_cycles.CANDIDATES)
    table = {"candidates": gemm_cycles.candidates_table(found)}
    assert markdown.insert(DOCUMENT, table) == DOCUMENT
