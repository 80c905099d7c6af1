"""What `benchmarks.train_speed --trace` prints, for a small trace in the form of jax.profiler.trace."""

import gzip
import json

import pytest

from benchmarks import train_speed, train_worker


def meta(pid, name, tid=None):
    kind = {"name": "process_name"} if tid is None else {"name": "thread_name", "tid": tid}
    return {"ph": "M", "pid": pid, "args": {"name": name}, **kind}


def event(pid, tid, name, ts, dur):
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": ts, "dur": dur}


EVENTS = [
    meta(1, "/device:GPU:0"),
    meta(1, "Stream #13(Compute)", 10),
    meta(1, "Stream #14(AllGather)", 11),
    meta(1, "XLA Ops", 12),
    meta(2, "/host:CPU"),
    meta(2, "Stream #1", 10),
    meta(3, "/device:GPU:1"),
    meta(3, "Stream #13(Compute)", 10),
    event(1, 10, "nvjet_tst_128x256_64x4_TNT", 0, 4000),
    event(1, 10, "quantize_pairs_kernel", 4000, 1000),
    event(1, 11, "ncclDevKernel_AllGather_RING_LL", 3000, 3000),  # half of it beside the others
    event(1, 10, "loop_multiply_fusion", 8000, 2000),
    event(1, 12, "loop_multiply_fusion", 8000, 2000),  # the same, by operation
    event(2, 10, "python", 0, 99),
    event(3, 10, "nvjet_tst_128x256_64x4_TNT", 0, 6000),
    {},
]


def test_kinds_idle_time_and_launches_by_hand():
    summary = train_worker.summarize(train_worker.kernels(EVENTS), steps=2)
    assert summary["devices"] == 2
    # Microseconds over two devices and two steps.
    assert summary["kinds"] == {
        "collectives": {"ms": 0.75, "launches": 0.25},
        "quantize": {"ms": 0.25, "launches": 0.25},
        "GEMM": {"ms": 2.5, "launches": 0.5},
        "elementwise": {"ms": 0.5, "launches": 0.25},
    }
    assert summary["span"] == (10 + 6) / 4
    assert summary["idle"] == 2 / 4  # from 6000 to 8000 on the first device
    assert next(iter(summary["longest"])) == "nvjet_tst_128x256_64x4_TNT"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7x64", "attention"),
        ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x128", "GEMM"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal>", "GEMM"),
        ("gemm_fusion_dot_12", "GEMM"),
        ("Cijk_Ailk_Bljk_BBS_BH_MT256x256x64", "GEMM"),
        ("quantize_gated_gradient_kernel", "quantize"),
        ("carry_kernel", "carrier"),
        ("carry_both_kernel", "carrier"),
        ("sift_kernel", "correction"),
        ("correct_kernel", "correction"),
        ("MemcpyD2D", "copies"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_SIMPLE", "collectives"),
        ("input_reduce_fusion_3", "elementwise"),
        ("loop_transpose_fusion", "elementwise"),
    ],
)
def test_kinds_by_name(name, kind):
    assert train_worker.kind_of(name) == kind


def test_a_profile_without_gpus_is_empty(capsys):
    summary = train_worker.summarize([], 3)
    train_worker.print_trace(summary)
    assert (summary["devices"], summary["kinds"]) == (0, {})
    assert capsys.readouterr().out == "the profile holds no kernel of a GPU\n"


def test_the_newest_profile_of_a_folder_is_printed_instead_of_measured(tmp_path, capsys):
    for day, events in (("2026_01_01", []), ("2026_01_02", EVENTS)):
        folder = tmp_path / "plugins" / "profile" / day
        folder.mkdir(parents=True)
        content = json.dumps({"traceEvents": events}).encode()
        (folder / "host.trace.json.gz").write_bytes(gzip.compress(content))
    train_speed.main(["--trace", str(tmp_path), "--steps", "2"])
    *lines, summary = capsys.readouterr().out.splitlines()
    assert any(line.startswith("| GEMM") for line in lines)
    assert any(line.startswith("| idle") for line in lines)
    assert json.loads(summary)["span"] == (10 + 6) / 4
    with pytest.raises(SystemExit, match="name the folder that"):
        train_speed.main(["--trace", str(tmp_path / "none")])
