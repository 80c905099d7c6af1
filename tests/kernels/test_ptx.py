"""Every kernel for each NVIDIA target: the instructions that round are those that the definitions allow for.

A kernel that a new version of Triton compiles to others, such as an emulation, shows here.
"""

import json
import re

import pytest

pytestmark = pytest.mark.exhaustive

SHARED_BYTES = {"sm_90": 227 * 1024, "sm_100": 227 * 1024, "sm_120": 99 * 1024}
"""Shared memory that a program can have. Source: CUDA C++ Programming Guide, technical specifications."""
TO_BFLOAT16 = "cvt.rn.bf16x2.f32"
IN_BFLOAT16 = {  # an element times its scale, which is exact
    *("fma.rn.bf16", "fma.rn.bf16x2", "mul.rn.bf16", "mul.rn.bf16x2")
}
BFLOAT16 = {
    "sm_90": "wgmma.mma_async f32.bf16.bf16",
    "sm_100": "tcgen05.mma kind::f16",
    "sm_120": "mma.sync f32.bf16.bf16.f32",
}
FP8 = {
    "sm_90": "wgmma.mma_async f32.e5m2.e4m3",
    "sm_100": "tcgen05.mma kind::f8f6f4",
    "sm_120": "mma.sync f32.e5m2.e4m3.f32",
}
FP4 = {  # in bfloat16 on Hopper, native on Blackwell
    "sm_90": {BFLOAT16["sm_90"], *IN_BFLOAT16},
    "sm_100": {"tcgen05.mma kind::mxf4.block_scale.block32"},
    "sm_120": {"mma.sync kind::mxf4nvf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0"},
}
ENCODE_FP4 = {"cvt.rn.satfinite.e2m1x2.f32"}
ENCODE_FP8 = {"cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.satfinite.e5m2x2.f32"}
# Scales; floor(x) of x >= 0; random bits; and pairs times their scale.
BLOCK16 = {"div.rn.f32", "rcp.approx.ftz.f32", "cvt.rmi.ftz.f32.f32", "cvt.rn.f32.u32", "mul.rn.bf16x2"}
HOPPER_PAIRS = {"cvt.rn.f16x2.f32", "fma.rn.bf16x2"}
BY_SCALE = "mul.rn.bf16x2"  # exact, but where no random number rounds the product up
GATHERED = {  # too few rows for sm_100's instruction, so in bfloat16 as on Hopper
    "sm_90": FP4["sm_90"],
    "sm_100": {BFLOAT16["sm_100"], "cvt.rn.bf16x2.e2m1x2", "fma.rn.bf16", "mul.rn.bf16"},
    "sm_120": FP4["sm_120"],
}


def allowed(kernel: str, target: str) -> set[str]:
    """Returns the instructions that round in a kernel for a target."""
    match kernel:
        case "gemm_kernel":
            return {*FP4[target], TO_BFLOAT16}
        case "correct_kernel":
            return {*GATHERED[target], FP8[target], TO_BFLOAT16}
        case "carry_kernel" | "cast_kernel":
            return ENCODE_FP8
        case "cast_normed_kernel":
            return {*ENCODE_FP8, TO_BFLOAT16, "cvt.rn.bf16.f32"}
        case "cast_gated_kernel" | "cast_gated_gradient_kernel":
            return {*ENCODE_FP8, TO_BFLOAT16, "ex2.approx.f32", "div.full.f32"}
        case "quantize_kernel":
            return HOPPER_PAIRS if target == "sm_90" else ENCODE_FP4
        case "quantize_pairs_kernel":
            return {*HOPPER_PAIRS, BY_SCALE}
        case "quantize_normed_kernel":
            return {*HOPPER_PAIRS, BY_SCALE, TO_BFLOAT16}
        case "quantize_gated_kernel" | "quantize_gated_gradient_kernel":
            approximate = {"ex2.approx.ftz.f32", "rcp.approx.ftz.f32"}
            return {*HOPPER_PAIRS, BY_SCALE, TO_BFLOAT16, *approximate}
        case "quantize_block16_kernel":
            return BLOCK16
        case "forward_kernel" | "key_gradients_kernel" | "query_gradients_kernel":
            exponential = {"ex2.approx.ftz.f32", "fma.rn.ftz.f32", "cvt.rn.f32.s32"}
            return {BFLOAT16[target], TO_BFLOAT16, *exponential}
    return set()


def rounding(ptx: str) -> set[str]:
    """Returns the instructions that multiply matrices, convert, approximate, flush, or round to 16 bits."""
    found = set()
    for opcode in re.findall(r"(?:^|[;{}])\s*(?:@!?[%\w]+\s+)?([a-z]\w*(?:\.[\w:]+)+)", ptx, re.M):
        if matrix := re.match(r"(wgmma\.mma_async|mma\.sync|tcgen05\.mma)\.(.*)", opcode):
            kept = re.sub(r"sync\.|aligned\.|m\d+n\d+k\d+\.|row\.col\.|cta_group::\d\.", "", matrix[2])
            found.add(f"{matrix[1]} {kept}")
        elif re.match(
            r"cvt\.r|(mul|add|sub|fma)\.\S*f16|div\.\S*f|(rcp|sqrt|ex2|lg2|tanh)\.|\S+\.ftz", opcode
        ):
            found.add(opcode)
    return found


@pytest.mark.parametrize("target", SHARED_BYTES)
def test_instructions_that_round_are_the_ones_allowed(more_builds, target):
    names = set()
    for path in sorted((more_builds / target).glob("*.json")):
        record, ptx = json.loads(path.read_text()), path.with_suffix(".ptx").read_text()
        names.add(record["kernel"])
        assert re.findall(r"^\.target (\S+)", ptx, re.M) == [f"{target}a"], path
        assert rounding(ptx) <= allowed(record["kernel"], target), path
        if record["kernel"] == "gemm_kernel":
            assert rounding(ptx) >= FP4[target] - IN_BFLOAT16, path
        assert record["shared_bytes"] <= SHARED_BYTES[target], path
        if "block16" in record["kernel"]:  # whose code fills the registers
            assert not record["resources"]["spills"], path
    assert len(names) >= 12
