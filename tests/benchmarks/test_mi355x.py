"""The arithmetic of paper_models/mi355x*.py by hand, and its document against the stored builds' numbers."""

import json
import pathlib
import re

import pytest

from benchmarks import markdown
from benchmarks.paper_models import (
    mi355x,
    mi355x_attention,
    mi355x_builds,
    mi355x_model,
    mi355x_rates,
    roofline,
)
from mxjax.kernels import shapes

DOCUMENT = (pathlib.Path(__file__).parents[2] / "docs" / "mi355x.md").read_text()
PEAK = mi355x_rates.CASES[0]


@pytest.fixture(scope="module")
def builds():
    return json.loads(mi355x.RESULTS.read_text())


def test_the_peaks_are_those_that_amd_publishes():
    published = {"bf16": 2516.6, "fp8": 5033.2, "mxfp4": 10066.3}
    assert {kind: round(rate / 1e12, 1) for kind, rate in mi355x_rates.PEAK.items()} == published
    # A fused multiply-add on two packed float32 numbers is four FLOPs of a lane: AMD's 157.3 TFLOP/s.
    assert round(mi355x_rates.VECTOR_RATE * 4 / 1e12, 1) == 157.3


def test_a_gemm_by_hand():
    shape = shapes.GemmShape("layer.fprop", 8192, 6144, 4096)
    seconds, limit = mi355x_rates.gemm_seconds(shape, "bf16", PEAK)
    assert limit == "matrix"
    assert seconds == pytest.approx(412_316_860_416 / 2.5165824e15)
    moved = (8192 * 4096 + 6144 * 4096) * 17 / 32 + 8192 * 6144 * 2
    assert roofline.gemm_bytes(shape, "mxfp4") == moved == 131_858_432
    thin = shapes.GemmShape("layer.wgrad", 8192, 6144, 32)
    assert roofline.gemm_bytes(thin, "fp8") == (8192 + 6144) * 32 + 8192 * 6144 * 4
    assert mi355x_rates.gemm_seconds(thin, "fp8", PEAK) == (pytest.approx(201_785_344 / 8e12), "HBM")


def test_the_bytes_of_a_pass_by_hand():
    gradient = shapes.TensorShape("layer.gradient", 8192, 4096)
    weight = shapes.TensorShape("layer.weight", 4096, 4096)
    assert roofline.pass_bytes(gradient, "fp8") == (2 + 2 + 1) * 8192 * 4096
    assert roofline.pass_bytes(gradient, "fp8", fp8_reads=1) == (2 + 1) * 8192 * 4096
    assert roofline.pass_bytes(gradient, "mxfp4") == 102_760_448  # 2 + 2 (1/2 + 1/32) an element
    assert roofline.pass_bytes(weight, "mxfp4") == 84_934_656
    assert roofline.pass_bytes(gradient, "bf16") == 0
    assert roofline.pass_bytes(weight, "bf16") == (4 + 2) * 4096 * 4096


def test_the_rotations_follow_the_policy():
    activation, gradient, weight = shapes.tensors(8192)[:3]
    assert [mi355x_builds.sides(t, "wgrad_hadamard") for t in (activation, gradient, weight)] == [
        (1, 16),
        (1, 16),
        (1, 1),
    ]
    assert mi355x_builds.sides(weight, "full_hadamard") == (16, 16)
    assert [roofline.kind_of(p, "dgrad") for p in mi355x_model.POLICIES] == ["bf16", "fp8", "mxfp4", "mxfp4"]


def test_vector_instructions_by_hand():
    constants = {"BLOCK_R": 128, "BLOCK_C": 64}
    build = {"kernel": {"vector": 600, "convert": 40, "scalar": 99}, "warps": 2, "constants": constants}
    assert mi355x_builds.vector_per_element(build) == 10  # 640 of a lane that has 64 elements


def test_attention_by_hand(builds):
    loop = {"v_mfma_f32_32x32x16_bf16": 4, "v_exp_f32_e32": 2, "v_add_f32_e32": 3, "s_barrier": 1}
    build = {"main_loop": loop, "warps": 8, "constants": {"BLOCK_Q": 64, "BLOCK_K": 32}}
    # Two waves a SIMD; 32768 FLOPs at 1024 a cycle, 16 cycles for an exponential, 4 for the others.
    assert mi355x_attention.tile_cycles(build) == (2 * 4 * 32, 2 * (2 * 16 + 4 * 4))
    tiles = 32 * 8192 * 4096 * 32 / (64 * 32)
    seconds = [mi355x_attention.kernel_seconds([build], overlap) for overlap in (True, False)]
    assert seconds == pytest.approx([tiles * 256 / (256 * 2.4e9), tiles * 352 / (256 * 2.4e9)])
    assert round(mi355x_attention.xla_seconds(), 4) == 0.0577
    kernels = json.loads(mi355x_attention.RESULTS.read_text())
    assert (
        markdown.insert(DOCUMENT, {"attention": mi355x_attention.attention_table(kernels, builds)})
        == DOCUMENT
    )


def test_rounds_of_programs():
    tiles = {"BLOCK_M": 256, "BLOCK_N": 256}
    assert mi355x_builds.rounds({"constants": tiles | {"M": 8192, "N": 4096}}) == (2, 1.0)
    assert mi355x_builds.rounds({"constants": tiles | {"M": 14336, "N": 4096}}) == (4, 0.875)


def test_a_step_by_hand(builds):
    parts = mi355x_model.step_seconds("bf16", 8192, builds, PEAK)
    assert parts["gemms"] == pytest.approx(6 * 8192 * 218_103_808 * 32 / 2.5165824e15)
    attention = 3.5 * 2 * 8192**2 * 32 * 128 * 32  # 2 S^2 d a layer forward, 5 S^2 d backward
    assert parts["attention"] == pytest.approx(attention / 2.5165824e15)
    assert parts["head"] == pytest.approx(6 * 8192 * 4096 * 128_256 / 2.5165824e15)
    assert parts["optimizer"] == pytest.approx(8_030_261_248 * 32 / 8 / 8e12)


def test_a_missing_build_is_named(builds):
    with pytest.raises(LookupError, match="float32 with rotations 1 and 1"):
        mi355x_builds.find_quantizer([], shapes.tensors(8192)[2], "wgrad_hadamard")
    with pytest.raises(LookupError, match="1 x 2 x 3"):
        mi355x_builds.find_gemm(builds, shapes.GemmShape("x", 1, 2, 3))


def test_an_aot_description_is_summarized():
    description = {
        "name": "gemm",
        "arguments": [{"name": "lhs", "dtype": "uint8"}, {"name": "out", "dtype": "bfloat16"}],
        "constants": {"M": 1},
        "warps": 8,
        "shared_bytes": 5,
        "resources": {"vgprs": 9},
        "main_loop": {"classes": {"matrix": 64}, "opcodes": {"ds_read_b128": 24, "ds_read2st64_b32": 2}},
        "whole_kernel": {"classes": {"vector": 7}},
    }
    summary = mi355x_builds.summarize(description)
    assert summary["lds_bytes"] == 24 * 16 + 2 * 8
    assert (summary["dtype"], summary["kernel"]) == ("bfloat16", {"vector": 7})


def test_the_document_holds_the_tables(builds):
    named = mi355x.tables(builds)
    documented = {name: named[name] for name in mi355x.DOCUMENTED}
    assert set(re.findall(r"<!-- end (.*?) -->", DOCUMENT)) == {*documented, "attention"}
    assert markdown.insert(DOCUMENT, documented) == DOCUMENT


def test_a_document_without_a_marker_is_refused():
    with pytest.raises(ValueError, match="markers 'rates', the document has 0"):
        markdown.insert("text", {"rates": "table"})
