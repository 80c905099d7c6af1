"""What the compiled machine code says; the compiler runs in a process without the interpreter."""

import json
import os
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


def run(*arguments, env=()):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | dict(env)
    command = [sys.executable, "-m", "mxjax.kernels.aot", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("aot")
    targets = ("--target", "gfx950", "--target", "sm_100", "--target", "sm_90")
    done = run(*targets, "--out", out, *(f"--only={name}" for name in LLAMA + SMALL))
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["failed"] == {}
    assert summary["built"] == len(list(out.glob("*/*.json")))
    return out


def descriptions(folder, target):
    found = [json.loads(path.read_text()) for path in sorted((folder / target).glob("*.json"))]
    assert len(found) >= len(LLAMA) + len(SMALL)
    return found


def test_gfx950_multiplies_in_fp4_without_spills(folder):
    for d in descriptions(folder, "gfx950"):
        resources = d["resources"]
        assert resources["vgpr_spills"] == resources["sgpr_spills"] == resources["scratch_bytes"] == 0, d[
            "name"
        ]
        assert d["shared_bytes"] <= 160 * 1024
        assert resources["waves_per_simd"] >= 1
        everything = d["whole_kernel"]["opcodes"]
        matrix = [opcode for opcode in everything if opcode.startswith(("v_mfma", "v_smfmac", "v_dot"))]
        assert matrix == ["v_mfma_scale_f32_16x16x128_f8f6f4"], d["name"]
        assert "scratch" not in d["whole_kernel"]["classes"]


def test_gfx950_loads_words(folder):
    """Elements by 16 bytes, scales by 4 or more, nothing by bytes, anywhere in the kernel."""
    for d in descriptions(folder, "gfx950"):
        loads = [
            x for x in d["whole_kernel"]["opcodes"] if x.startswith(("global_load", "buffer_load", "ds_read"))
        ]
        assert not [
            x for x in loads if any(narrow in x for narrow in ("byte", "_u8", "_i8", "short", "16"))
        ], d["name"]
        assert any("load" in x and "dwordx4" in x for x in loads)


@pytest.mark.parametrize("name", LLAMA)
def test_gfx950_main_loop(folder, name):
    """One pass over 256 of k: operands go straight into LDS, and nothing is written there from registers."""
    d = json.loads((folder / "gfx950" / f"{name}.json").read_text())
    loop = d["main_loop"]
    assert loop["is_loop"]
    tile = d["constants"]["BLOCK_M"] * d["constants"]["BLOCK_N"] * d["constants"]["BLOCK_K"]
    assert loop["classes"]["matrix"] == tile // (16 * 16 * 128) // d["warps"]
    assert {x for x in loop["opcodes"] if x.endswith(" lds")} <= {
        "buffer_load_dword lds",
        "buffer_load_dwordx4 lds",
        "global_load_lds_dword lds",
        "global_load_lds_dwordx4 lds",
    }
    assert "global_load" not in loop["classes"]
    assert "lds_write" not in loop["classes"]
    assert "lds_permute" not in loop["classes"]
    assert "scratch" not in loop["classes"]


def test_sm_100_multiplies_in_fp4(folder):
    for d in descriptions(folder, "sm_100"):
        ptx = (folder / "sm_100" / f"{d['name']}.ptx").read_text()
        assert "tcgen05.mma.cta_group::1.kind::mxf4.block_scale" in ptx, d["name"]
        assert d["resources"]["scratch_bytes"] == 0
        assert d["whole_kernel"]["classes"]["matrix"] > 0
    assert (folder / "sm_100" / f"{LLAMA[0]}.cubin").stat().st_size > 0


def test_sm_90_multiplies_in_bfloat16(folder):
    for d in descriptions(folder, "sm_90"):
        assert any("HGMMA" in x or "HMMA" in x for x in d["whole_kernel"]["opcodes"]), d["name"]


def test_description_is_enough_to_launch(folder):
    d = json.loads((folder / "gfx950" / "gemm_1x65x33x288_float32.json").read_text())
    assert d["kernel"] == "gemm_kernel"
    assert [a["name"] for a in d["arguments"]] == ["lhs", "lhs_scales", "rhs", "rhs_scales", "out"]
    assert [a["output"] for a in d["arguments"]] == [False] * 4 + [True]
    assert d["arguments"][0] == {"name": "lhs", "shape": [1, 65, 144], "dtype": "uint8", "output": False}
    assert [a["offset"] for a in d["kernarg_layout"][:5]] == [0, 8, 16, 24, 32]
    assert (d["threads_per_warp"], d["warps"], len(d["grid"])) == (64, d["constants"]["BLOCK_M"] // 32, 3)
    assert d["constants"]["K"] == 288
    assert (folder / "gfx950" / "gemm_1x65x33x288_float32.hsaco").read_bytes()[:4] == b"\x7fELF"


@pytest.fixture(scope="module")
def quantizers(tmp_path_factory):
    out = tmp_path_factory.mktemp("quantizers")
    targets = ("--target", "gfx950", "--target", "sm_90")
    done = run(*targets, "--out", out, *(f"--only={name}" for name in STEP + SMALL_TENSORS))
    assert done.returncode == 0, done.stderr
    return {(d["target"], d["name"]): d for d in (json.loads(p.read_text()) for p in out.glob("*/*.json"))}


def test_quantizers_spill_nothing(quantizers):
    assert len(quantizers) == 2 * (len(STEP) + 6)
    for d in quantizers.values():
        spilled = [n for name, n in d["resources"].items() if "spills" in name or "scratch" in name]
        assert spilled
        assert not any(spilled), d["name"]
        assert "scratch" not in d["whole_kernel"]["classes"]


LIMITS = [(5, 18), (4, 22), (5, 13), (4, 24)]  # of STEP: waves a SIMD, instructions an element


@pytest.mark.parametrize(
    ("name", "waves", "limit"), [(name, *limits) for name, limits in zip(STEP, LIMITS, strict=True)]
)
def test_gfx950_quantizer(quantizers, name, waves, limit):
    """Loads of the tensor and stores of the words are of 16 bytes, and the hardware converts."""
    d = quantizers["gfx950", name]
    opcodes, constants = d["whole_kernel"]["opcodes"], d["constants"]
    elements = constants["BLOCK_R"] * constants["BLOCK_C"] // (d["warps"] * d["threads_per_warp"])
    loads = {x: n for x, n in opcodes.items() if x.startswith(("global_load", "buffer_load", "flat_load"))}
    assert loads == {"buffer_load_dwordx4": elements // (4 if "float32" in name else 8)}
    stores = {
        x: n for x, n in opcodes.items() if x.startswith(("global_store", "buffer_store", "flat_store"))
    }
    assert stores == {"buffer_store_dwordx4": 2 * elements // 32, "buffer_store_short": 2}
    conversions = {x: n for x, n in opcodes.items() if x.startswith("v_cvt")}
    assert conversions == {"v_cvt_scalef32_pk_fp4_f32": 2 * elements // 2}
    assert d["resources"]["waves_per_simd"] >= waves
    assert sum(opcodes.values()) <= limit * elements


@pytest.mark.parametrize("name", STEP)
def test_sm_90_quantizer(quantizers, name):
    d = quantizers["sm_90", name]
    opcodes, constants = d["whole_kernel"]["opcodes"], d["constants"]
    elements = constants["BLOCK_R"] * constants["BLOCK_C"] // (d["warps"] * d["threads_per_warp"])
    assert {x: n for x, n in opcodes.items() if x.startswith("LDG")} == {
        "LDG.E.128": elements // (4 if "float32" in name else 8)
    }
    stores = {x: n for x, n in opcodes.items() if x.startswith("STG")}
    assert stores == {"STG.E.128": 2 * elements // 32, "STG.E.U16": 2}
    assert d["resources"]["registers"] <= 168  # three programs a multiprocessor


def test_quantizer_description_is_enough_to_launch(quantizers):
    d = quantizers["gfx950", STEP[0]]
    names = ["x", "scalars", "signs", "row_words", "row_scales", "column_words", "column_scales"]
    assert [a["name"] for a in d["arguments"]] == names
    assert [a["output"] for a in d["arguments"]] == [False] * 3 + [True] * 4
    shapes = {a["name"]: a["shape"] for a in d["arguments"]}
    assert shapes["x"] == [1, 1, 8192, 4096]
    assert shapes["row_words"] == [1, 1, 8192, 512]
    assert shapes["column_scales"] == [1, 1, 4096, 256]
    assert [a["offset"] for a in d["kernarg_layout"][:7]] == [0, 8, 16, 24, 32, 40, 48]
    assert (d["kernel"], d["grid"]) == ("quantize_kernel", [64, 64, 1])


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
    jobs = [("gemm", "gfx950", "no_such_build"), ("gemm", "gfx950", "gemm_1x1x1x32_float32")]
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
