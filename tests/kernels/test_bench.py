"""The benchmarks end to end on tiny shapes: their reports, and that wrong results get no times."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest

from mxjax import devices
from mxjax.kernels.bench import (
    attention_cases,
    bench_attention,
    bench_compile,
    bench_dot,
    bench_export,
    bench_gemm,
    bench_lost,
    bench_products,
    bench_quantize,
    bench_ragged,
    gemm_cases,
)
from mxjax.kernels.bench.timing import Timing, measure
from mxjax.kernels.matmul import correct, fp8_matmul
from mxjax.kernels.matmul.tiles import Tiles

HEADER = {"device", "jax", "packages", "commit", "command", "kernels", "records"}


class NotInstalled:
    """Hides the packages that the benchmarks compare with."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in ("torch", "torchao", "qwix"):
            raise ModuleNotFoundError(f"No module named {name!r}")


@pytest.fixture(autouse=True)
def without_peers(monkeypatch):
    for name in ("torch", "torchao", "qwix"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [NotInstalled, *sys.meta_path])
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # which the benchmarks set
    monkeypatch.setitem(bench_dot.LINEARS, "tiny", (32, 32))


QUANTIZE = ["--shapes", "32x64", "--rounds", "1", "--commit", "abc"]
DOT = ["--tokens", "32", "--linears", "tiny", "--rounds", "1", "--commit", "abc"]


def printed(capsys):
    lines = capsys.readouterr().out.splitlines()
    return lines, json.loads(lines[-1])


@pytest.mark.slow
def test_quantize_reports_every_line_with_its_time_or_why_there_is_none(capsys, tmp_path):
    only = ["copy", "columns, to bfloat16", "rows, "]
    bench_quantize.main([*QUANTIZE, "--only", *only, "--out", str(tmp_path / "numbers.json")])
    lines, report = printed(capsys)
    assert set(report) == HEADER
    assert report["commit"] == "abc"
    assert "none" not in report["kernels"]
    assert report["command"].startswith("python -m mxjax.kernels.bench.bench_quantize --shapes 32x64 ")
    records = {r["name"]: r for r in report["records"]}
    assert records["rows, jax.numpy"]["bytes"] == 2 * 32 * 64 + 32 * 64 // 2 + 64
    values = records["both, H16 on columns, to bfloat16"]
    assert values["bytes"] == 3 * 2 * 32 * 64
    assert 0 < values["p10"] <= values["median"] <= values["p90"]
    assert {name: r["absent"] for name, r in records.items() if "absent" in r} == {
        name: f"ModuleNotFoundError: No module named '{package}'"
        for name, package in (
            ("copy, torch", "torch"),
            ("rows, torchao to_mx, torch.compile", "torch"),
            ("rows, torchao to_mx, eager", "torch"),
            ("rows, qwix.quantize", "qwix"),
        )
    }
    assert sum("absent: " in line for line in lines) == 4
    assert json.loads((tmp_path / "numbers.json").read_text()) == report


def test_quantize_times_nothing_that_is_not_the_definition(monkeypatch, capsys):
    right = bench_quantize.pack_operands

    def wrong(x, *uses):
        return right(x.at[0, 0].set(100), *uses)

    monkeypatch.setattr(bench_quantize, "pack_operands", wrong)
    with pytest.raises(SystemExit, match=r"failed: rows: \d+ of 1024 differ from the definition"):
        bench_quantize.main([*QUANTIZE, "--only", "rows"])
    _, report = printed(capsys)
    [record] = [r for r in report["records"] if r["name"] == "rows"]
    assert set(record) == {"shape", "name", "absent"}


@pytest.mark.slow
def test_dot_reports_ratios_and_parts(capsys):
    lines = ["--policies", "wgrad", "--implementations", "fp8_carriers", "--peers", "qwix QtProvider, fp8"]
    bench_dot.main([*DOT, *lines, "--compile"])
    _, report = printed(capsys)
    assert set(report) == HEADER
    baseline, ours, peer = report["records"]
    assert (baseline["name"], baseline["of_jnp_dot"]) == ("jnp.dot, bfloat16", 1)
    assert ours["of_jnp_dot"] == ours["median"] / baseline["median"]
    assert 0.05 < ours["differs"] < 0.3
    assert set(ours["parts"]) == {"quantize", "operands"}
    assert set(ours) == {
        *("tokens", "linear", "d_in", "d_out", "name", "median", "p10", "p90"),
        *("of_jnp_dot", "parts", "first_call", "differs"),
    }
    assert peer["absent"].startswith("ModuleNotFoundError")


def test_dot_starts_no_line_after_its_seconds(capsys):
    bench_dot.main([*DOT, "--policies", "wgrad", "--peers", "--seconds", "0"])
    _, report = printed(capsys)
    late = [r["name"] for r in report["records"] if "absent" in r]
    assert late == ["wgrad, xla", "wgrad, fp8_carriers", "wgrad_hadamard, fp8_carriers: compilation"]


GEMM = ["--tokens", "64", "--gemms", "tiny.fprop", "--rounds", "1", "--commit", "abc"]


@pytest.fixture
def tiny_gemm(monkeypatch):
    """Lets the command line name a small GEMM, and forgets the operands of others."""
    monkeypatch.setitem(bench_dot.LINEARS, "tiny", (256, 64))


@pytest.mark.parametrize(
    "implementations",
    [
        pytest.param(["xla"], marks=pytest.mark.slow),
        pytest.param(["xla", "fp8_carriers"], marks=pytest.mark.exhaustive),  # a minute in the interpreter
    ],
    ids=" ".join,
)
def test_ragged_reports_every_case_with_its_time_or_why_there_is_none(implementations, capsys):
    sizes = ["--rows", "256", "--widths", "32", "64", "--sizes", "skewed", "--policies", "wgrad"]
    bench_ragged.main([*sizes, "--rounds", "1", "--implementations", *implementations])
    *lines, record = capsys.readouterr().out.strip().splitlines()
    records = json.loads(record)["records"]
    timed = [r["name"] for r in records if "absent" not in r]
    assert [f"mxjax wgrad, {name}" for name in implementations] == [n for n in timed if "static" not in n][
        -len(implementations) :
    ]
    assert all(sum(r["sizes"]) == 256 and len(r["sizes"]) == 8 for r in records)
    assert all(r.get("median", 1) > 0 for r in records)
    assert lines[0].startswith("skewed: rows of the experts [")


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_gemm")
def test_gemm_times_every_candidate_and_writes_the_fastest(capsys, tmp_path):
    bench_gemm.main([*GEMM, "--table", str(tmp_path / "tiles.json")])
    lines, report = printed(capsys)
    assert set(report) == HEADER
    records = report["records"]
    assert [r["by"] for r in records] == ["jnp.dot, bfloat16", "jnp.dot, FP8", "mxjax", "mxjax"]
    assert all(0 < r["p10"] <= r["median"] <= r["p90"] for r in records)
    table = json.loads((tmp_path / "tiles.json").read_text())
    [entry] = table["gemms"]
    fastest = min(records[2:], key=lambda r: r["median"])
    assert (entry["gemm"], entry["tile"]) == ([64, 64, 256, 1], fastest["tile"])
    assert any("tile table: " in line for line in lines)


@pytest.mark.usefixtures("tiny_gemm")
def test_gemm_times_no_candidate_with_wrong_bits(monkeypatch, capsys, tmp_path):
    right = gemm_cases.launch

    def wrong(*operands_and_more):
        tiles = operands_and_more[-1]
        y = right(*operands_and_more)
        return y.at[0, 3, 5].set(jnp.nan) if tiles.m == 64 else y

    monkeypatch.setattr(gemm_cases, "launch", wrong)
    with pytest.raises(SystemExit, match=r"failed: tiny\.fprop, 64x64x256.*: 1 of 4096 elements are wrong"):
        bench_gemm.main([*GEMM, "--table", str(tmp_path / "tiles.json")])
    _, report = printed(capsys)
    assert [set(r) for r in report["records"] if r["by"] == "mxjax"][1] >= {"absent"}
    [entry] = json.loads((tmp_path / "tiles.json").read_text())["gemms"]
    assert entry["tile"][0] == 128


LOST = ["--shapes", "17x5x96", "--rounds", "1", "--commit", "abc"]


@pytest.mark.slow
def test_lost_rows_are_timed_after_a_comparison(monkeypatch, capsys):
    monkeypatch.setattr(correct, "GATHERED", None)  # the interpreter has tiles of its own
    bench_lost.main([*LOST, "--shares", "0.5", "--tiles", "64", "128", "64", "4", "6"])
    assert Tiles(64, 128, 64, warps=4, stages=6) == correct.GATHERED
    lines, report = printed(capsys)
    assert set(report) == HEADER
    assert [r.get("rows") for r in report["records"]] == [None, 8]
    assert all(0 < r["p10"] <= r["median"] <= r["p90"] for r in report["records"])
    assert any("| 0.5 lost" in line for line in lines)


def test_products_that_are_not_computed_again_get_no_time(monkeypatch, capsys):
    def keep(y, operands, left, right, target):
        return [y, *(jnp.exp2(q.unit.astype(jnp.float32) - 127) for q in (left, right))]

    monkeypatch.setattr(fp8_matmul, "correct", keep)
    fp8_matmul._matmul.cache_clear()
    with pytest.raises(SystemExit, match="failed: 1 lost: AssertionError: the result differs"):
        bench_lost.main([*LOST, "--shares", "1"])
    assert "median" not in printed(capsys)[1]["records"][1]
    fp8_matmul._matmul.cache_clear()  # nothing keeps what was traced with it


@pytest.mark.slow
def test_float32_products_are_timed_beside_their_errors(capsys):
    bench_products.main(["--shapes", "64x96x64", "--rounds", "1"])
    records = json.loads(capsys.readouterr().out.splitlines()[-1])["records"]
    errors = {(r["gemm"], r["name"]): r["error"] for r in records}
    for gemm in ("fprop", "dgrad", "wgrad"):
        assert 0 < errors[gemm, "float32"] < 1e-6
        assert 0 < errors[gemm, "halves"] < 2e-6
        assert 1e-3 < errors[gemm, "bfloat16"] < 1e-2
    with pytest.raises(SystemExit):
        bench_products.main(["--shapes", "8x96x64"])


def test_attention_times_every_candidate_and_the_whole(capsys):
    bench_attention.main(["--shapes", "1x19x2x1x64", "--rounds", "1", "--commit", "abc"])
    lines, report = printed(capsys)
    assert set(report) == HEADER
    timed = [(r["which"], r["by"]) for r in report["records"] if "absent" not in r]
    whole = [(which, by) for which in ("forward", "forward and backward") for by in ("xla", "mxjax")]
    assert timed == [(which, "mxjax") for which in ("forward", "key_gradients", "query_gradients")] + whole
    assert sum("absent: " in line for line in lines) == 2  # cuDNN


@pytest.mark.slow
def test_attention_times_nothing_that_is_wrong(monkeypatch):
    monkeypatch.setattr(attention_cases.launches, "forward", lambda q, k, v, *_: (1.5 * q, None))
    [case, *_] = attention_cases.kernel_cases(attention_cases.Shape(1, 19, 2, 1, 64))
    with pytest.raises(AssertionError, match="differs from the float32 reference"):
        attention_cases.run_case(case, rounds=1)


@pytest.mark.parametrize("shape", ["1x33", "1x33x3x2x64", "1x33x2x1x96", "axb"])
def test_attention_refuses_shapes_that_the_kernels_do_not_take(shape, capsys):
    with pytest.raises(SystemExit):
        bench_attention.main(["--shapes", shape])
    assert repr(shape) in capsys.readouterr().err


@pytest.mark.exhaustive
def test_compilation_is_timed_with_an_empty_and_with_a_filled_cache():
    seconds = bench_compile.compile_seconds("wgrad", "xla", 32, 64, 96)
    parts = {"trace", "lower", "compile", "compiled", "from_disk"}
    assert {state: set(numbers) for state, numbers in seconds.items()} == {"cold": parts, "warm": parts}
    assert seconds["warm"]["compile"] < seconds["cold"]["compile"]
    with pytest.raises(RuntimeError, match="invalid choice: 'nonsense'"):
        bench_compile.compile_seconds("wgrad", "nonsense", 32, 64, 96)


@pytest.mark.exhaustive
def test_kernels_are_compiled_once_and_kept_on_disk():
    seconds = bench_compile.compile_seconds("wgrad", "triton", 64, 64, 64, "gfx950")
    cold, warm = seconds["cold"], seconds["warm"]
    assert (cold["from_disk"], warm["compiled"]) == (0, 0)
    assert cold["compiled"] > 0
    assert warm["from_disk"] > 0
    assert warm["lower"] < cold["lower"]


def test_measure_waits_for_the_last_call_alone():
    waited = []
    timing = measure(
        lambda x: x + 1, jnp.float32(1), rounds=3, round_seconds=1e-6, wait=lambda r: waited.append(float(r))
    )
    assert isinstance(timing, Timing)
    assert waited == [2.0] * 5  # compilation, calibration and three rounds
    assert jax.block_until_ready(timing) == timing


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="carries a program for the CPU")
@pytest.mark.parametrize(
    ("program", "results"),
    [("wgrad", {"y", "dx", "dw"}), pytest.param("step:bf16", {"loss", "blocks/qkv"}, marks=pytest.mark.slow)],
)
def test_an_exported_program_is_compared_with_the_native_one(capsys, tmp_path, monkeypatch, program, results):
    sizes = ("32", "64", "32")
    monkeypatch.setattr(devices, "_override", [])
    bench_export.main(["write", str(tmp_path), "--target", "cpu", "--programs", program, "--sizes", *sizes])
    bench_export.main(["run", str(tmp_path), "--rounds", "1"])
    _, report = printed(capsys)
    (record,) = report["records"]
    assert record["program"] == program
    assert results <= set(record["differing"])
    assert not any(record["differing"].values())
    assert min(record["carried"], record["native"]) > 0
    (description,) = tmp_path.glob("*.json")
    description.write_text(description.read_text().replace('"cpu"', '"sm_90"'))
    with pytest.raises(SystemExit, match=r"is for sm_90, and this device is cpu"):
        bench_export.main(["run", str(tmp_path)])


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="carries a program for the CPU")
def test_what_cannot_be_compared_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "_override", [])
    write = ["write", str(tmp_path), "--target", "cpu", "--programs", "wgrad", "--sizes", "32", "64", "32"]
    bench_export.main(write)
    description = tmp_path / "wgrad.json"
    description.write_text(description.read_text().replace('"wgrad"', '"bf16"'))
    with pytest.raises(SystemExit, match="other bits: bf16"):
        bench_export.main(["run", str(tmp_path), "--rounds", "1"])
    with pytest.raises(SystemExit, match="not run: --seconds have passed"):
        bench_export.main(["run", str(tmp_path), "--seconds", "0"])
    with pytest.raises(SystemExit, match="has no programs: make them with"):
        bench_export.main(["run", str(tmp_path / "none")])
