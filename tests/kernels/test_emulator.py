"""The emulator of gfx950 in tests/kernels/gfx950: its arithmetic, its bounds and its waits."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from gfx950 import arithmetic, machine
from gfx950.memory import BASE, Memory

LANES = 64
LATE = ("vmcnt", "lgkmcnt")
RECORD = {
    "grid": [2, 1, 1],
    "block": [128, 1, 1],
    "shared_bytes": 1024,
    "descriptor": {
        **dict.fromkeys(("user_sgpr_dispatch_ptr", "user_sgpr_queue_ptr", "user_sgpr_dispatch_id"), 0),
        **dict.fromkeys(("user_sgpr_private_segment_size", "user_sgpr_kernarg_preload_length"), 0),
        "user_sgpr_kernarg_segment_ptr": 1,
        "user_sgpr_count": 2,
        "system_sgpr_workgroup_id_x": 1,
        "system_sgpr_workgroup_id_y": 0,
        "system_sgpr_workgroup_id_z": 0,
    },
}
# Loads a word for each of 256 work-items, hands it to another wave through LDS, and stores it there.
PROGRAM = """
kernel:
	s_load_dwordx2 s[4:5], s[0:1], 0x0
	v_lshlrev_b32_e32 v1, 2, v0
	s_lshl_b32 s3, s2, 9
	s_waitcnt lgkmcnt(0)
	s_add_u32 s4, s4, s3
	s_addc_u32 s5, s5, 0
	s_mov_b32 s6, 0x7ffffffe
	s_mov_b32 s7, 0x27000
	buffer_load_dword v2, v1, s[4:7], 0 offen
	v_xor_b32_e32 v3, 0x100, v1
	s_waitcnt vmcnt(0)
	ds_write_b32 v1, v2
	s_waitcnt lgkmcnt(0)
	s_barrier
	ds_read_b32 v2, v3
	s_waitcnt lgkmcnt(0)
	buffer_store_dword v2, v1, s[4:7], 0 offen
	s_endpgm
.Lfunc_end0:
"""


def run(text, words=256, **options):
    """Returns the words that a program left of 0, 1, 2, ..."""
    memory = Memory(BASE, 1 << 16)
    address = memory.allocate(4 * words, 16)
    memory.at(address, 4 * words)[:] = np.arange(words, dtype=np.uint32).view(np.uint8)
    kernarg = memory.allocate(8, 8)
    memory.at(kernarg, 8)[:] = np.frombuffer(address.to_bytes(8, "little"), np.uint8)
    machine.run(RECORD, text, memory, kernarg, **options)
    return memory.at(address, 4 * words).view(np.uint32)


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("late", [(), ("lgkmcnt",), LATE])
def test_waves_exchange_words(late, seed):
    wanted = np.arange(256).reshape(2, 2, 64)[:, ::-1].reshape(-1)
    np.testing.assert_array_equal(run(PROGRAM, late=late, seed=seed), wanted)


def without(line, before):
    text = PROGRAM.replace(f"\t{line}\n\t{before}", f"\t{before}")
    assert text != PROGRAM
    return text


def test_a_missing_wait_shows_when_transfers_are_late():
    text, wanted = without("s_waitcnt vmcnt(0)", "ds_write"), run(PROGRAM)
    np.testing.assert_array_equal(run(text), wanted)
    assert (run(text, late=LATE) != wanted).any()


@pytest.mark.parametrize(
    ("line", "before"), [("s_barrier", "ds_read"), ("s_waitcnt lgkmcnt(0)", "s_barrier")]
)
@pytest.mark.parametrize("late", [(), LATE])
def test_a_missing_barrier_or_wait_before_it_is_a_race(line, before, late):
    with pytest.raises(AssertionError, match=r"race in LDS: wave . runs 'ds_"):
        run(without(line, before), late=late)


# Both waves read what wave 0 then loads over, after a barrier.
OVERWRITTEN = """
	ds_read_b32 v5, v3
	WAIT
	s_barrier
	s_mov_b32 m0, 0
	v_cmp_gt_u32_e32 vcc, 64, v0
	s_and_saveexec_b64 s[8:9], vcc
	buffer_load_dword v1, s[4:7], 0 offen lds
	s_endpgm
"""


def test_a_load_over_words_that_are_being_read_is_a_race():
    """No wave reads the wrong word here unless its read is late and the load is early."""
    text = PROGRAM.replace("\ts_endpgm\n", OVERWRITTEN.strip("\n") + "\n")
    np.testing.assert_array_equal(run(text.replace("WAIT", "s_waitcnt lgkmcnt(0)")), run(PROGRAM))
    with pytest.raises(AssertionError, match=r"'buffer_load_dword .* lds' while a read of the same bytes"):
        run(text.replace("\tWAIT\n", ""))


def test_nothing_past_an_array_is_touched():
    with pytest.raises(AssertionError, match="outside of every array"):
        run(PROGRAM, words=255)


def test_unknown_instructions_and_modifiers_stop_the_run():
    with pytest.raises(KeyError, match="v_unheard_of"):
        run(PROGRAM.replace("v_xor_b32_e32", "v_unheard_of"))
    for line in (
        "v_xor_b32_e32 v3, 0x100, v1 mul:2",
        "v_cndmask_b32_e64 v3, -v1, v1, s[4:5]",
        "v_fmac_f32_e64 v3, v1, v1 clamp",
        "v_and_b32_sdwa v3, v1, v2 dst_sel:WORD_1 src0_sel:WORD_1 src1_sel:WORD_1",
        "ds_read_u16_d16_hi v3, v1",
        "s_load_dword s9, s[0:1], s3",
        "s_load_dword s9, s[0:1], 0x0\n\ts_waitcnt lgkmcnt(1)",
    ):
        with pytest.raises(AssertionError):
            run(PROGRAM.replace("v_xor_b32_e32 v3, 0x100, v1", line), late=LATE)
    for line in ("flat_store_dword v[0:1], v2", "v_cmp_gt_u16_e32 vcc, v1, v2"):
        with pytest.raises(KeyError):
            run(PROGRAM.replace("v_xor_b32_e32 v3, 0x100, v1", line))


@pytest.mark.parametrize("exponent", [-126, -3, 0, 5, 100])
def test_conversion_to_e2m1_is_that_of_ml_dtypes(exponent):
    x = np.concatenate([np.arange(-70, 70) / 8, [np.inf, -np.inf, -0.0]]).astype(np.float32)
    scaled = np.ldexp(x, exponent).astype(np.float32)
    found = arithmetic.to_e2m1(scaled, np.full(x.shape, 2.0**exponent, np.float32))
    wanted = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(found, wanted)


def test_fused_multiply_add_rounds_once():
    """Against exact fractions, whose nearest float32 is the nearer of two neighbours."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 2000)).astype(np.float32)
    c = (-a * b * np.exp2(rng.integers(-30, 2, 2000))).astype(np.float32)
    found = arithmetic.fma(a, b, c)
    for x, y, z, got in zip(a, b, c, found, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        around = [np.nextafter(got, np.float32(side)) for side in (-np.inf, np.inf)]
        distance = abs(Fraction(float(got)) - exact)
        assert all(distance <= abs(Fraction(float(other)) - exact) for other in around)


def test_maximum_follows_the_document():
    """V_MAX_F32: +0 is larger than -0, a number than a quiet NaN, and a signaling NaN is quieted."""
    bits = [0x80000000, 0, 0x7FC00000, 0x7F800001, 0x3F800000, 0xBF800000]
    numbers = np.array(bits, np.uint32).view(np.float32)
    a, b = (x.ravel() for x in np.meshgrid(numbers, numbers))
    found = arithmetic.larger(a, b).view(np.uint32).reshape(6, 6)
    least = [0x80000000, 0, 0x80000000, 0x7FC00001, 0x3F800000, 0x80000000]
    assert found[0].tolist() == least
    assert found[3].tolist() == [0x7FC00001] * 6
    assert found[5].tolist() == [0x80000000, 0, 0xBF800000, 0x7FC00001, 0x3F800000, 0xBF800000]
    assert np.array_equal(arithmetic.smaller(-a, -b).view(np.uint32) ^ (1 << 31), found.ravel())


def test_bytes_are_selected_with_their_signs():
    """V_PERM_B32: selectors 8 to 11 repeat the sign of byte 1, 3, 5 or 7."""
    a, b = (np.full(LANES, word, np.uint32) for word in (0x80017F02, 0xFF00FE03))
    for selectors, wanted in ((0x0B0A0908, 0xFF00FFFF), (0x07060100, 0x8001FE03), (0x0D0C0302, 0xFF00FF00)):
        assert set(arithmetic.bytes_of(a, b, np.full(LANES, selectors, np.uint32)).tolist()) == {wanted}
