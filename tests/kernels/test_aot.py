"""What the compiled machine code says; the compiler runs in a process without the interpreter."""

import json
import os
import re
import subprocess
import sys

import pytest

from mxjax.kernels import aot, assembly

pytestmark = pytest.mark.slow

LLAMA = ["gemm_1x8192x6144x4096_bfloat16", "gemm_1x4096x6144x8192_float32", "gemm_1x8192x4096x14336_bfloat16"]
SMALL = ["gemm_1x65x33x288_float32", "gemm_3x17x130x544_bfloat16", "gemm_2x*_tile*"]
# Activation or gradient and weight, of wgrad_hadamard and full_hadamard.
STEP = [
    "quantize_8192x4096_bfloat16_rows_packed_columns_packed-h16",
    "quantize_8192x4096_bfloat16_rows_packed-h16_columns_packed-h16",
    "quantize_4096x6144_float32_rows_packed_columns_packed",
    "quantize_4096x6144_float32_rows_packed-h16_columns_packed-h16",
]
SMALL_TENSORS = ["quantize_65x97_*", "quantize_8192x4096_bfloat16_rows_packed_columns_packed-sr"]
CARRIERS = ["carry_8192x4096_*", "carry_8192x28672_*", "carry_33x96_*", "correct_1x8192x6144x4096_*"]


def run(*arguments, env=()):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | dict(env)
    # One process, as tests run in two already: each imports JAX and Triton.
    command = [sys.executable, "-m", "mxjax.kernels.aot", "--jobs=1", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def build(out, targets, patterns=()):
    """Returns the descriptions of builds by name."""
    done = run(*(f"--target={t}" for t in targets), "--out", out, *(f"--only={name}" for name in patterns))
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["failed"] == {}
    found = {(d["target"], d["name"]): d for d in (json.loads(p.read_text()) for p in out.glob("*/*.json"))}
    assert {(d["target"], d["name"]) for d in summary["builds"]} <= found.keys()
    assert summary["built"] == len(summary["builds"])
    return found


def starting(opcodes, *prefixes):
    return {x: n for x, n in opcodes.items() if x.startswith(prefixes)}


@pytest.fixture(scope="module")
def gfx950(tmp_path_factory):
    """Every build for gfx950."""
    return {name: d for (_, name), d in build(tmp_path_factory.mktemp("gfx950"), ["gfx950"]).items()}


@pytest.fixture(scope="module")
def gemms(gfx950):
    found = [d for d in gfx950.values() if d["kernel"] == "gemm_kernel"]
    assert len(found) == len(aot.list_builds("gemm_builds", "gfx950"))
    return found


@pytest.fixture(scope="module")
def quantizers(gfx950):
    found = [d for d in gfx950.values() if d["kernel"] == "quantize_kernel"]
    assert len(found) == len(aot.list_builds("quantize_builds", "gfx950"))
    return found


@pytest.fixture(scope="module")
def cuda(tmp_path_factory):
    out, patterns = tmp_path_factory.mktemp("cuda"), LLAMA[:1] + SMALL + STEP
    build(out, ["sm_90"], SMALL_TENSORS + CARRIERS)
    return build(out, ["sm_90", "sm_100"], patterns)


def test_gfx950_spills_nothing(gfx950):
    for name, d in gfx950.items():
        resources = d["resources"]
        assert resources["vgpr_spills"] == resources["sgpr_spills"] == resources["scratch_bytes"] == 0, name
        assert d["shared_bytes"] <= 160 * 1024
        assert resources["waves_per_simd"] >= 1
        assert "scratch" not in d["whole_kernel"]["classes"]


def test_gfx950_multiplies_in_fp4(gemms):
    for d in gemms:
        matrix = starting(d["whole_kernel"]["opcodes"], "v_mfma", "v_smfmac", "v_dot")
        assert list(matrix) == ["v_mfma_scale_f32_16x16x128_f8f6f4"], d["name"]


def test_gfx950_gemms_load_words(gemms):
    """Elements by 16 bytes and scales by 4, each once, from memory; both by 4 or 16 from LDS.

    In the main loop as in what stands before and after it: no byte of a tile is loaded by anything else.
    """
    for d in gemms:
        c, threads = d["constants"], d["block"][0]
        tile = (c["BLOCK_M"] + c["BLOCK_N"]) * c["BLOCK_K"]  # elements
        elements, scales = tile // 2 // (16 * threads), tile // 32 // (4 * threads)
        loops = [d["main_loop"]["opcodes"]] if d["main_loop"]["is_loop"] else []
        for opcodes in [d["whole_kernel"]["opcodes"], *loops]:
            loads = starting(opcodes, "global_load", "buffer_load", "flat_load")
            wide = sum(n for x, n in loads.items() if re.search(r"dwordx4\b", x))
            narrow = sum(n for x, n in loads.items() if re.search(r"dword\b", x))
            assert wide + narrow == sum(loads.values()), (d["name"], loads)
            passes = wide // elements
            assert (wide, narrow) == (passes * elements, passes * scales), (d["name"], loads)
            assert passes == 1 or opcodes not in loops
            reads = starting(opcodes, "ds_read", "ds_load")
            assert set(reads) <= {"ds_read_b128", "ds_read_b32", "ds_read2st64_b32", "ds_read2_b32"}, d[
                "name"
            ]


def test_gfx950_scales_are_few_words_of_lds(gemms):
    """A word has the scales of 32 rows and both halves of k; a wave reads its part of a tile's once."""
    for d in (d for d in gemms if d["main_loop"]["is_loop"]):
        rows, columns = d["constants"]["BLOCK_M"] // 32, d["constants"]["BLOCK_N"] // 32
        splits = [(i, d["warps"] // i) for i in (1, 2, 4, 8) if i <= d["warps"]]
        opcodes = d["main_loop"]["opcodes"]
        words = opcodes.get("ds_read_b32", 0) + 2 * opcodes.get("ds_read2st64_b32", 0)
        assert words == min(rows // i + columns // j for i, j in splits), d["name"]


def test_gfx950_main_loop(gemms):
    """One pass over 256 of k: operands go straight into LDS, and nothing is written there from registers."""
    loops = [d for d in gemms if d["main_loop"]["is_loop"]]
    assert {d["name"] for d in loops} >= set(LLAMA)
    for d in loops:
        loop = d["main_loop"]
        tile = d["constants"]["BLOCK_M"] * d["constants"]["BLOCK_N"] * d["constants"]["BLOCK_K"]
        assert loop["classes"]["matrix"] == tile // (16 * 16 * 128) // d["warps"]
        assert set(starting(loop["opcodes"], "buffer_load", "global_load")) <= {
            "buffer_load_dword lds",
            "buffer_load_dwordx4 lds",
            "global_load_lds_dword lds",
            "global_load_lds_dwordx4 lds",
        }
        assert not {"global_load", "lds_write", "lds_permute", "scratch"} & set(loop["classes"])


def sides_of(d):
    """Returns form and whether rounding is stochastic of each side that a quantizer writes."""
    c = d["constants"]
    sides = [(c[f"{side}_FORM"], c[f"{side}_STOCHASTIC"]) for side in ("ROW", "COLUMN")]
    return [side for side in sides if side[0]]


def elements_of(d):
    """Returns the elements that a thread of a quantizer takes."""
    return d["constants"]["BLOCK_R"] * d["constants"]["BLOCK_C"] // d["block"][0]


def row_bytes(d):
    return d["constants"]["C"] * (4 if d["arguments"][0]["dtype"] == "float32" else 2)


def test_gfx950_quantizers_convert_by_the_hardware(quantizers):
    """Each pair of elements that is rounded to nearest; the others, and bfloat16, by no FP4 conversion."""
    for d in quantizers:
        pairs = elements_of(d) // 2
        found = starting(d["whole_kernel"]["opcodes"], "v_cvt_scalef32")
        wanted = pairs * sum(side == ("packed", False) for side in sides_of(d))
        assert found == ({"v_cvt_scalef32_pk_fp4_f32": wanted} if wanted else {}), d["name"]


def test_gfx950_quantizers_load_16_bytes(quantizers):
    """All of the tensor where its rows start at multiples of 16 bytes; signs and keys by words or more."""
    aligned = [d for d in quantizers if row_bytes(d) % 16 == 0]
    assert len(aligned) > len(quantizers) // 2
    for d in aligned:
        c, loads = d["constants"], starting(d["whole_kernel"]["opcodes"], "global_load", "buffer_load")
        assert not starting(d["whole_kernel"]["opcodes"], "flat_load")
        wide = sum(loads.pop(f"{space}_load_dwordx4", 0) for space in ("global", "buffer"))
        wanted = elements_of(d) * row_bytes(d) // c["C"] // 16
        if c["ROW_SIGNS"] or c["COLUMN_SIGNS"] or c["ROW_STOCHASTIC"] or c["COLUMN_STOCHASTIC"]:
            assert wide >= wanted, d["name"]
            assert set(loads) <= {"buffer_load_dword", "global_load_dwordx2"}, (d["name"], loads)
        else:
            assert (wide, loads) == (wanted, {}), d["name"]


def test_gfx950_quantizers_store_16_bytes(quantizers):
    """All elements, whose rows are filled up to 16 bytes whatever the shape; the scales are bytes."""
    for d in quantizers:
        stores = starting(d["whole_kernel"]["opcodes"], "global_store", "buffer_store", "flat_store")
        bits = sum({"packed": 4, "bf16": 16}[form] for form, _ in sides_of(d))
        assert stores.pop("buffer_store_dwordx4") == elements_of(d) * bits // 128, d["name"]
        assert set(stores) <= {"buffer_store_short", "buffer_store_byte"}
        assert sum(stores.values()) <= 2 * len(sides_of(d)), d["name"]


LIMITS = [(5, 18), (4, 22), (5, 13), (4, 24)]  # of STEP: waves a SIMD, instructions an element


@pytest.mark.parametrize(
    ("name", "waves", "limit"), [(name, *limits) for name, limits in zip(STEP, LIMITS, strict=True)]
)
def test_gfx950_quantizer_is_short(gfx950, name, waves, limit):
    d = gfx950[name]
    assert d["resources"]["waves_per_simd"] >= waves
    assert sum(d["whole_kernel"]["opcodes"].values()) <= limit * elements_of(d)
    assert starting(d["whole_kernel"]["opcodes"], "buffer_store_short", "buffer_store_byte") == {
        "buffer_store_short": 2
    }


def test_cuda_spills_nothing(cuda):
    assert {kernel["kernel"] for kernel in cuda.values()} == {
        "gemm_kernel",
        "quantize_kernel",
        "carry_kernel",
        "correct_kernel",
    }
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


def test_sm_100_multiplies_in_fp4(cuda):
    for name, opcodes in opcodes_of(cuda, "sm_100", "gemm_kernel"):
        assert starting(opcodes, "UTCOMMA"), name  # tcgen05.mma of 4-bit operands with block scales
        assert not starting(opcodes, "HMMA", "HGMMA", "UTCHMMA", "UTCQMMA"), name


def test_sm_90_multiplies_in_bfloat16(cuda):
    for kernel in ("gemm_kernel", "correct_kernel"):
        for name, opcodes in opcodes_of(cuda, "sm_90", kernel):
            assert starting(opcodes, "HGMMA", "HMMA"), name


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
@pytest.mark.parametrize("name", STEP)
def test_cuda_quantizer(cuda, target, name):
    """Loads of the tensor and stores of the words are of 16 bytes, and on sm_100 the hardware converts.

    Where a thread takes whole blocks, columns are loaded row by row, two columns to a thread.
    """
    d = cuda[target, name]
    opcodes, elements = d["whole_kernel"]["opcodes"], elements_of(d)
    float32 = "float32" in name
    loads = {"LDG.E.128": elements // (4 if float32 else 8)}
    if d["constants"]["GROUP"] == 32:
        loads["LDG.E.64" if float32 else "LDG.E"] = elements // 2
    assert starting(opcodes, "LDG") == loads
    assert starting(opcodes, "STG") == {"STG.E.128": 2 * elements // 32, "STG.E.U16": 2}
    assert d["resources"]["registers"] <= 168  # three programs a multiprocessor
    if target == "sm_100":
        assert sum(n for x, n in opcodes.items() if "E2M1" in x) == 2 * elements // 2


@pytest.mark.parametrize("carrier", ["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", ["8192x4096", "8192x28672"])
def test_sm_90_carrier(cuda, shape, carrier):
    """A thread takes two blocks: 16 bytes of elements to a load and to a store, and 4 conversions a block."""
    d = cuda["sm_90", f"carry_{shape}_{carrier}"]
    opcodes = d["whole_kernel"]["opcodes"]
    blocks = d["constants"]["ROWS"] * d["constants"]["BLOCKS"] // d["block"][0]
    assert starting(opcodes, "LDG.E.128", "STG.E.128") == {"LDG.E.128": blocks, "STG.E.128": 2 * blocks}
    assert sum(n for x, n in opcodes.items() if carrier.upper() in x) == 4 * blocks


@pytest.mark.parametrize("target", aot.TARGETS)
def test_builds_have_names_of_their_own(target):
    builds = [b for module in aot.MODULES for b in aot.list_builds(module, target)]
    assert len({b.name for b in builds}) == len(builds)
    alike = {(b.kernel.__name__, str(b.signature), str(b.constants), b.num_warps) for b in builds}
    assert len(alike) == len(builds)


def test_unknown_target_names_those_there_are(tmp_path):
    done = run("--target", "gfx000", "--out", tmp_path)
    assert done.returncode != 0
    assert "gfx950, sm_90, sm_100" in done.stderr


def test_refuses_the_interpreter_and_unknown_names(tmp_path):
    done = run("--target", "gfx950", "--out", tmp_path, env={"TRITON_INTERPRET": "1"})
    assert done.returncode != 0
    assert "TRITON_INTERPRET" in done.stderr
    done = run("--target", "gfx950", "--out", tmp_path, "--only", "nothing")
    assert done.returncode != 0
    assert "nothing" in done.stderr


def test_a_failed_build_is_named_and_the_others_are_made(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    jobs = [
        ("gemm_builds", "gfx950", "no_such_build"),
        ("gemm_builds", "gfx950", "gemm_1x1x1x32_float32"),
    ]
    done, failed = aot.build_all(jobs, tmp_path, jobs=2)
    assert [d["name"] for d in done] == ["gemm_1x1x1x32_float32"]
    assert list(failed) == ["gfx950 no_such_build"]


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
        (64, 0, 4, 8),
        (65, 0, 4, 7),
        (128, 0, 4, 4),
        (256, 0, 8, 2),
        (512, 0, 4, 1),
        (64, 80 * 1024, 4, 2),
        (437, 141280, 4, 1),
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
