"""The arithmetic of benchmarks/mi355x.py by hand, and docs/mi355x.md against the stored builds' numbers."""

import json
import re

import pytest

from benchmarks import mi355x
from mxjax.kernels.cases import shapes

PEAK, BEST = mi355x.CASES[:2]


def test_the_peaks_are_those_that_amd_publishes():
    published = {"bf16": 2516.6, "fp8": 5033.2, "mxfp4": 10066.3}
    assert {kind: round(rate / 1e12, 1) for kind, rate in mi355x.PEAK.items()} == published
    # A fused multiply-add on two packed float32 numbers is four FLOPs of a lane: AMD's 157.3 TFLOP/s.
    assert round(mi355x.VECTOR_RATE * 4 / 1e12, 1) == 157.3


def test_a_gemm_by_hand():
    shape = shapes.GemmShape("layer.fprop", 8192, 6144, 4096)
    assert mi355x.gemm_seconds(shape, "bf16", PEAK) == pytest.approx(412_316_860_416 / 2.5165824e15)
    assert mi355x.gemm_bytes(shape, "mxfp4") == (8192 + 6144) * 4096 * 17 / 32 + 8192 * 6144 * 2
    thin = shapes.GemmShape("layer.wgrad", 8192, 6144, 32)  # which memory limits
    moved = (8192 + 6144) * 32 + 8192 * 6144 * 4
    assert mi355x.gemm_seconds(thin, "fp8", PEAK) == pytest.approx(moved / 8e12)


def test_aiters_times_are_those_of_its_table():
    """The line has three terms for four times; it leaves 4 %."""
    for sizes, rate in mi355x.AITER.items():
        m, n, k = sizes
        seconds = mi355x.gemm_seconds(shapes.GemmShape("layer.fprop", *sizes), "mxfp4", BEST)
        assert seconds == pytest.approx(2 * m * n * k / rate, rel=0.05)


def test_the_bytes_of_a_pass_by_hand():
    gradient = shapes.TensorShape("layer.gradient", 8192, 4096)
    weight = shapes.TensorShape("layer.weight", 4096, 4096)
    assert mi355x.pass_bytes(gradient, "fp8") == (2 + 2 + 1) * 8192 * 4096
    assert mi355x.pass_bytes(gradient, "fp8", fp8_reads=1) == (2 + 1) * 8192 * 4096
    assert mi355x.pass_bytes(gradient, "mxfp4") == 102_760_448  # 2 + 2 (1/2 + 1/32) an element
    assert mi355x.pass_bytes(weight, "bf16") == (4 + 2) * 4096 * 4096


def test_a_quantizer_is_limited_by_memory_or_by_instructions():
    activation, _, weight = shapes.tensors(8192)[:3]
    assert mi355x.quantizer_name(weight, "wgrad_hadamard").endswith("float32_rows_packed_columns_packed")
    name = mi355x.quantizer_name(activation, "wgrad_hadamard")
    assert name == "quantize_8192x4096_bfloat16_rows_packed_columns_packed-h16"
    build = {"kernel": {"vector": 600, "convert": 40, "scalar": 99}, "warps": 2}
    build["constants"] = {"BLOCK_R": 128, "BLOCK_C": 64}  # 640 instructions of a lane that has 64 elements
    elements = 8192 * 4096
    for factor, seconds in ((1, 102_760_448 / 8e12), (100, 1000 * elements / mi355x.VECTOR_RATE)):
        builds = {name: build | {"kernel": {k: factor * n for k, n in build["kernel"].items()}}}
        found = mi355x.quantize_seconds(activation, "wgrad_hadamard", builds, PEAK)
        assert found == pytest.approx(seconds)


def test_attention_by_hand():
    loop = {"v_mfma_f32_32x32x16_bf16": 4, "v_exp_f32_e32": 2, "v_add_f32_e32": 3, "s_barrier": 1}
    build = {"main_loop": loop, "warps": 8, "constants": {"BLOCK_Q": 64, "BLOCK_K": 32}}
    # Two waves a SIMD; 32768 FLOPs at 1024 a cycle, 16 cycles for an exponential, 4 for the others.
    tiles = 32 * 8192 * 4096 * 32 / (64 * 32)
    seconds = [mi355x.attention_seconds([build], overlap) for overlap in (True, False)]
    assert seconds == pytest.approx([tiles * 256 / (256 * 2.4e9), tiles * 352 / (256 * 2.4e9)])


def test_a_step_by_hand():
    parts = mi355x.step_seconds("bf16", 8192, {}, PEAK)
    assert parts["GEMMs"] == pytest.approx(6 * 8192 * 218_103_808 * 32 / 2.5165824e15)
    attention = 3.5 * 2 * 8192**2 * 32 * 128 * 32  # 2 S^2 d a layer forward, 5 S^2 d backward
    assert parts["attention"] == pytest.approx(attention / 2.5165824e15)
    assert parts["head"] == pytest.approx(6 * 8192 * 4096 * 128_256 / 2.5165824e15)
    assert parts["optimizer"] == pytest.approx(8_030_261_248 * 32 / 8 / 8e12)


def test_the_page_holds_the_tables():
    page, named = mi355x.PAGE.read_text(), mi355x.tables()
    assert set(re.findall(r"<!-- end (.*?) -->", page)) == set(named)
    assert mi355x.insert(page, named) == page


def test_records_are_stored_by_the_names_that_the_model_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(mi355x, "RESULTS", tmp_path)
    (tmp_path / "gfx950").mkdir()
    stored = [
        json.loads((mi355x.ROOT / f"docs/results/gfx950-{n}.json").read_text())
        for n in ("builds", "attention")
    ]
    for build in (build for builds in stored for build in builds):
        loop = {"opcodes": build.get("main_loop"), "classes": {}}
        record = build | {"whole_kernel": {"classes": build.get("kernel")}, "main_loop": loop}
        (tmp_path / "gfx950" / f"{build['name']}.json").write_text(json.dumps(record))
    mi355x.store(tmp_path)
    assert [list(mi355x.load(name).values()) for name in ("builds", "attention")] == stored
