"""Builds by `python -m mxjax.kernels.cases`, made once for all tests that read them."""

import fcntl
import json
import os
import subprocess
import sys

LLAMA = ["gemm_1x8192x6144x4096_bfloat16", "gemm_1x4096x6144x8192_float32", "gemm_1x8192x4096x14336_bfloat16"]
# Fprop, Dgrad and Wgrad of the experts of Mixtral 8x7B.
EXPERTS = [
    *("grouped_rows_8x32768x14336x4096", "grouped_rows_8x32768x4096x14336"),
    "grouped_sums_8x4096x14336x32768",
]
# Activation or gradient and weight, of wgrad_hadamard and full_hadamard.
STEP = [
    "quantize_8192x4096_bfloat16_rows_packed_columns_packed-h16",
    "quantize_8192x4096_bfloat16_rows_packed-h16_columns_packed-h16",
    "quantize_4096x6144_float32_rows_packed_columns_packed",
    "quantize_4096x6144_float32_rows_packed-h16_columns_packed-h16",
]
# What the emulator of gfx950 runs in seconds, in shapes with edges; each option of a kernel is in some build.
EMULATED_GEMMS = [
    *("gemm_2x*_tile*", "grouped_rows_*_tile64x64", "grouped_rows_*_tile128x128"),
    *("grouped_sums_*_tile64x64", "grouped_sums_*_tile128x128", "grouped_sums_*_tile256x256"),
    *("gemm_1x1x1x32_float32", "gemm_1x5x7x96_bfloat16", "gemm_1x64x64x256_float32"),
    *("gemm_1x65x33x288_float32", "gemm_1x256x256x512_bfloat16", "gemm_1x1100x70x32_float32"),
    "gemm_3x17x130x544_bfloat16",
]
EMULATED_QUANTIZERS = [
    *("quantize_3x40x70_bfloat16_*", "quantize_65x97_float*", "quantize_65x97_*_rows_packed-sr_*"),
    *("quantize_65x97_*_rows_packed-32x32_*", "quantize_65x97_*_rows_packed-h128-*"),
    *("quantize_65x97_*_rows_packed_columns_packed-h16-redrawn", "quantize_65x97_*_rows_bf16_*"),
]
EMULATED_ATTENTION = ["attention_*_1x149x1x2x64_*"]
EMULATED = [*EMULATED_GEMMS, *EMULATED_QUANTIZERS, *EMULATED_ATTENTION]
# What it runs before a release.
MORE_GEMMS = [f"gemm_1x{shape}_*" for shape in ("1x1x32", "5x7x96", "64x64x256", "65x33x288", "256x256x512")]
MORE_GEMMS += ["gemm_1x1100x70x32_*", "gemm_3x17x130x544_*", "grouped_rows_*_tile*256*"]
MORE_GEMMS += ["grouped_sums_*_tile128x256", "grouped_sums_*_tile256x128"]
MORE_SHAPES = ("1x1", "1x33", "32x32", "33x1", "3x40x70", "65x97", "128x128", "256x256")
MORE_QUANTIZERS = [f"quantize_{shape}_*" for shape in MORE_SHAPES]
MORE_ATTENTION = ["attention_*_1x149x1x2x128_*"]
SMALL_GEMMS = ["gemm_1x65x33x288_float32", "gemm_3x17x130x544_bfloat16", "gemm_2x*_tile*"]
SMALL_KERNELS = ["carry_33x96_*", "sift_1x65x33_float32_*", "correct_1x65x33x288_float32", "draw_1_64_128"]
# The builds for sm_90 that Triton's interpreter runs, and those that only the exhaustive tests run.
INTERPRETED = [
    *("gemm_1x65x33x288_float32", "gemm_3x17x130x544_bfloat16", *SMALL_KERNELS),
    *("quantize_65x97_bfloat16_rows_packed_*", "quantize_65x97_float32_rows_packed-0.75-32x32_*"),
    *("quantize_normed_200x160_*_packed", "quantize_normed_200x160_*-rceil-sr"),
    *("quantize_gated_result_200x160_*-even", "quantize_gated_result_200x160_*_packed-sr"),
    *("quantize_gated_gradient_200x160_*-h16", "quantize_gated_gradient_200x160_*-h16-redrawn"),
    *("cast_208x144_*", "cast_*_208x144"),
]
MORE_INTERPRETED = [
    *("block16_65x97_nvfp4_*", "block16_65x97_quartet2_gradient_[02]", "block16_65x97_ue5m3_gradient_1"),
    *("gemm_1x5x7x96_float32", "gemm_1x65x33x288_bfloat16", "gemm_3x17x130x544_float32"),
    *("quantize_200x136_*", "quantize_*_200x160_*", "carry_1x8224_*", "correct_3x17x130x544_bfloat16"),
    *(
        "quantize_65x97_float32_rows_packed_*",
        "quantize_65x97_bfloat16_rows_none_*",
        "quantize_65x97_float16_*",
    ),
    *("sift_3x17x130_bfloat16_*", "correct_1x65x33x288_bfloat16", "correct_3x17x130x544_float32"),
]
BUILDS = {
    "gfx950": [
        *(*EMULATED, "draw_*", "attention_*_1x8192x*"),
        *(*LLAMA, *EXPERTS, *STEP, "quantize_8192x4096_bfloat16_rows_packed-sr_columns_packed-sr"),
    ],
    "sm_90": [
        *(LLAMA[0], *STEP[:3], "sift_1x65x33_float32_*", "draw_1_64_128"),
        "quantize_8192x4096_bfloat16_rows_packed_columns_packed-sr",
        *("carry_8192x4096_e4m3", "carry_8192x28672_e5m2", "correct_1x8192x6144x4096_*"),
    ],
    "sm_100": [LLAMA[0], STEP[0], STEP[3]],
    "sm_120": [SMALL_GEMMS[0]],
}
"""Patterns of the builds that the tests take, by target."""
EVERY_KERNEL = [
    *("gemm_1x65x33x288_float32", "gemm_1x8192x6144x4096_bfloat16", "correct_1x65x33x288_float32"),
    *("carry_33x96_*", "sift_1x65x33_float32_*", "cast_208x144_bfloat16", "draw_1_64_128"),
    "quantize_65x97_*_packed_columns_packed-h16",
    *("quantize_65x97_float32_rows_packed-0.75-32x32_*", "quantize_65x97_bfloat16_rows_none_*"),
    *(
        "block16_65x97_nvfp4_*",
        "block16_65x97_four_over_six_weight_1",
        "block16_65x97_quartet2_gradient_[02]",
    ),
    *("block16_65x97_ue5m3_gradient_1", "attention_*_1x149x1x2x128_*"),
]
MORE_BUILDS = {
    "sm_90": [
        *(*MORE_INTERPRETED, *EVERY_KERNEL, *SMALL_GEMMS, STEP[3], "carry_8192x*"),
        "block16_8192x4096_four_over_six_*",
    ],
    "sm_100": [*SMALL_GEMMS, *EVERY_KERNEL, *STEP],
    "sm_120": EVERY_KERNEL,
}
"""Patterns of the builds that only the exhaustive tests take."""


def build_once(tmp_path_factory, name="builds", builds=BUILDS):
    """Returns a folder with the builds, the same in all processes of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    out, done = base / name, base / f"{name}.done"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            build(out, builds)
            done.touch()
    return out


def build(out, builds):
    """Compiles the builds with these names, patterns by target, into a folder."""
    command = [sys.executable, "-m", "mxjax.kernels.cases", "--jobs=2", "--out", str(out)]
    for target, patterns in builds.items():
        command += [f"--target={target}", *(f"--only={target}/{pattern}" for pattern in patterns)]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["failed"] == {}
    assert {(d["target"], d["name"]) for d in summary["builds"]} == records(out).keys()
    assert summary["built"] == len(summary["builds"])


def records(out):
    """Returns the records in a folder of builds, by target and name."""
    found = [json.loads(path.read_text()) for path in out.glob("*/*.json")]
    return {(record["target"], record["name"]): record for record in found}


def starting(opcodes, *prefixes):
    """Returns the counts of the opcodes that start with one of the prefixes."""
    return {x: n for x, n in opcodes.items() if x.startswith(prefixes)}


def elements_of(record):
    """Returns the elements that a thread of a quantizer takes."""
    constants = record["constants"]
    return constants["BLOCK_R"] * constants["BLOCK_C"] // record["block"][0]
