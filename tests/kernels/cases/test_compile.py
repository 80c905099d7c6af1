"""The command `python -m mxjax.kernels.cases`, how it reads assembly, and the machine code for CUDA."""

import pytest
import triton
from support.code_objects import STEP, elements_of, records, starting
from support.marks import parametrize

from mxjax.kernels.cases import assembly
from mxjax.kernels.cases import compile as aot


@pytest.fixture(scope="module")
def cuda(builds):
    return {key: record for key, record in records(builds).items() if key[0] != "gfx950"}


@pytest.mark.slow
def test_cuda_spills_nothing(cuda):
    kernels = {
        f"{name}_kernel"
        for name in ["gemm", "quantize", "quantize_pairs", "carry", "sift", "correct", "draw"]
    }
    assert {kernel["kernel"] for kernel in cuda.values()} == kernels
    assert_spills_nothing(cuda)


@pytest.mark.exhaustive
def test_more_builds_for_cuda_spill_nothing(more_builds):
    assert_spills_nothing(records(more_builds))


def assert_spills_nothing(cuda):
    for d in cuda.values():
        assert d["resources"]["scratch_bytes"] == d["resources"]["stack_bytes"] == 0, d["name"]
        assert d["resources"]["spills"] == 0, d["name"]
        assert d["resources"]["warps_per_multiprocessor"] >= d["warps"], d["name"]
        assert "scratch" not in d["whole_kernel"]["classes"]


def opcodes_of(cuda, target, kernel):
    found = [
        (d["name"], d["whole_kernel"]["opcodes"])
        for (of, _), d in cuda.items()
        if (of, d["kernel"]) == (target, kernel)
    ]
    assert found
    return found


@pytest.mark.slow
def test_cuda_multiplies_in_the_units_of_its_formats(cuda):
    for name, opcodes in opcodes_of(cuda, "sm_100", "gemm_kernel"):
        assert starting(opcodes, "UTCOMMA"), name  # tcgen05.mma of 4-bit operands with block scales
        assert not starting(opcodes, "HMMA", "HGMMA", "UTCHMMA", "UTCQMMA"), name
    for name, opcodes in opcodes_of(cuda, "sm_90", "gemm_kernel"):
        assert starting(opcodes, "HGMMA", "HMMA"), name  # bfloat16
    for name, opcodes in opcodes_of(cuda, "sm_90", "correct_kernel"):
        assert starting(opcodes, "HGMMA", "HMMA"), name
        assert starting(opcodes, "QGMMA"), name  # wgmma of FP8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "name"), [*(("sm_90", name) for name in STEP[:3]), ("sm_100", STEP[0]), ("sm_100", STEP[3])]
)
def test_cuda_quantizer(cuda, target, name):
    """Loads of the tensor and stores of the words have 16 bytes, and on sm_100 the hardware converts.

    If a thread takes whole blocks, it loads columns row by row, two at a time. Hopper's kernel stores rows
    word by word, with 16 threads side by side.
    """
    d = cuda[target, name]
    opcodes, elements = d["whole_kernel"]["opcodes"], elements_of(d)
    float32 = "float32" in name
    if d["kernel"] == "quantize_pairs_kernel":
        assert (target, elements) == ("sm_90", 128)
        assert starting(opcodes, "LDG") == {"LDG.E.128": elements // 8}
        assert starting(opcodes, "STG") == {"STG.E": elements // 8 + 2, "STG.E.128": elements // 32}
        assert d["resources"]["registers"] <= 128  # four programs a multiprocessor
        return
    loads = {"LDG.E.128": elements // (4 if float32 else 8)}
    if d["constants"]["GROUP"] == 32:
        loads["LDG.E.64" if float32 else "LDG.E"] = elements // 2
    assert starting(opcodes, "LDG") == loads
    assert starting(opcodes, "STG") == {"STG.E.128": 2 * elements // 32, "STG.E.U16": 2}
    assert d["resources"]["registers"] <= 168  # three programs a multiprocessor
    if target == "sm_100":
        assert sum(n for x, n in opcodes.items() if "E2M1" in x) == 2 * elements // 2


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "carrier"), [("8192x4096", "e4m3"), ("8192x28672", "e5m2")])
def test_sm_90_carrier(cuda, shape, carrier):
    """A thread takes two blocks: loads and stores have 16 bytes, and a block takes 4 conversions.

    With groups, which few programs write, it has the code twice.
    """
    d = cuda["sm_90", f"carry_{shape}_{carrier}"]
    opcodes = d["whole_kernel"]["opcodes"]
    blocks = d["constants"]["ROWS"] * d["constants"]["BLOCKS"] // d["block"][0]
    times = 2 if d["constants"]["GROUP"] else 1
    wanted = {"LDG.E.128": times * blocks, "STG.E.128": times * 2 * blocks}
    assert starting(opcodes, "LDG.E.128", "STG.E.128") == wanted
    assert sum(n for x, n in opcodes.items() if carrier.upper() in x) == times * 4 * blocks


@parametrize("target", *aot.TARGETS[:2], slow=aot.TARGETS[2:])
def test_builds_have_names_of_their_own(target):
    builds = [b for module in aot.MODULES for b in aot.list_builds(module, target)]
    assert len({b.name for b in builds}) == len(builds)
    alike = {(b.kernel.__name__, str(b.expected), str(b.constants), b.num_warps) for b in builds}
    assert len(alike) == len(builds)


def refused(capsys, *arguments):
    """Returns why the command line refuses its arguments."""
    with pytest.raises(SystemExit):
        aot.main(arguments)
    return capsys.readouterr().err


def test_refuses_the_interpreter_and_unknown_names(capsys, monkeypatch):
    assert "gfx950, sm_90, sm_100" in refused(capsys, "--target", "gfx000", "--out", "unused")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET" in refused(capsys, "--target", "gfx950", "--out", "unused")
    monkeypatch.delenv("TRITON_INTERPRET")
    message = refused(capsys, "--target", "gfx950", "--out", "unused", "--only", "sm_90/*")
    assert "no build is named like sm_90/*" in message


def test_gfx950_builds_have_no_ping_pong_whatever_the_environment_says(monkeypatch):
    monkeypatch.setenv("TRITON_HIP_USE_BLOCK_PINGPONG", "1")
    monkeypatch.setattr(triton, "compile", lambda *_, **__: triton.knobs.amd.use_block_pingpong)
    build = aot.list_builds("matmul", "gfx950")[0]
    assert aot.compile_build(build, "gfx950") is False
    assert triton.knobs.amd.use_block_pingpong is True


def test_a_failed_build_is_named_and_the_others_are_made(tmp_path, monkeypatch):
    def build_one(module, target, name, out):
        if name == "wrong":
            raise ValueError("first line\nlast line")
        return {"target": target, "name": name}

    monkeypatch.setattr(aot, "build_one", build_one)
    wanted = [("matmul", "gfx950", name) for name in ("wrong", "right")]
    done, failed = aot.build_all(wanted, tmp_path, jobs=1)
    assert [d["name"] for d in done] == ["right"]
    assert failed == {"gfx950 wrong": "last line"}


LISTING = """
kernel:
	s_load_dwordx2 s[0:1], s[2:3], 0x0
.LBB0_1:                                ; =>This Inner Loop Header
	buffer_load_dwordx4 v1, s[8:11], 0 offen lds
	ds_read_b128 v[0:3], v9 offset:16
	v_mfma_scale_f32_32x32x64_f8f6f4 v[0:15], v[16:19], v[20:23], v[0:15], v1, v2 cbsz:4
	s_cbranch_scc1 .LBB0_1
.LBB0_2:
	v_add_u32_e32 v0, v1, v2
	v_mul_u32_u24_e32 v0, v1, v2
	s_cbranch_vccnz .LBB0_2
	s_endpgm
.Lfunc_end0:
"""


def test_main_loop_is_the_one_with_matrix_instructions():
    body, is_loop = assembly.main_loop(assembly.amd_instructions(LISTING))
    assert is_loop
    assert assembly.count_opcodes(body) == {
        "buffer_load_dwordx4 lds": 1,
        "ds_read_b128": 1,
        "v_mfma_scale_f32_32x32x64_f8f6f4": 1,
        "s_cbranch_scc1": 1,
    }
    assert assembly.count_classes(body) == {"global_to_lds": 1, "lds_read": 1, "matrix": 1, "branch": 1}


def test_without_a_loop_the_whole_kernel_is_counted():
    body, is_loop = assembly.main_loop(
        assembly.amd_instructions(LISTING.replace(".LBB0_1:", "").replace(".LBB0_2:", ""))
    )
    assert not is_loop
    assert len(body) == 9


@pytest.mark.parametrize(
    ("vgprs", "lds_bytes", "warps", "waves"),
    [
        *((64, 0, 4, 8), (65, 0, 4, 7), (128, 0, 4, 4), (256, 0, 8, 2), (512, 0, 4, 1)),
        *((64, 80 * 1024, 4, 2), (437, 141280, 4, 1)),
    ],
)
def test_occupancy(vgprs, lds_bytes, warps, waves):
    assert assembly.amd_occupancy(vgprs, lds_bytes, warps) == waves


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "warps", "resident"),
    [(32, 0, 4, 64), (33, 0, 4, 48), (96, 0, 4, 20), (255, 0, 8, 8), (32, 227 * 1024, 4, 4), (16, 0, 1, 32)],
)
def test_cuda_occupancy(registers, shared_bytes, warps, resident):
    assert assembly.cuda_occupancy(registers, shared_bytes, warps) == resident


def test_cuda_spills_are_stores_to_local_memory():
    sass = "B--:R\tSTL [R1+0x4], R2;\nB--:R\tLDL R2, [R1+0x4];\nB--:R\tSTL.64 [R1], R4;\nB--:R\tEXIT;\n"
    assert assembly.cuda_spills(assembly.cuda_instructions(sass)) == 2
