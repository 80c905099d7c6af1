"""The benchmarks end to end on tiny shapes: their reports, and that wrong results get no times."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest

from mxjax.kernels.bench import bench_compile, bench_dot, bench_quantize, bench_tiles
from mxjax.kernels.bench.timing import Timing, measure
from mxjax.kernels.matmul.tiles import TILES, Tiles

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


@pytest.mark.slow
def test_compilation_is_timed_with_an_empty_and_with_a_filled_cache():
    seconds = bench_compile.compile_seconds("wgrad", "xla", 32, 64, 96)
    assert {state: set(parts) for state, parts in seconds.items()} == {
        state: {"lower", "compile"} for state in ("cold", "warm")
    }
    assert seconds["warm"]["compile"] < seconds["cold"]["compile"]
    with pytest.raises(RuntimeError, match="AssertionError: nonsense"):
        bench_compile.compile_seconds("wgrad", "nonsense", 32, 64, 96)


def test_measure_waits_for_the_last_call_alone():
    waited = []
    timing = measure(
        lambda x: x + 1, jnp.float32(1), rounds=3, round_seconds=1e-6, wait=lambda r: waited.append(float(r))
    )
    assert isinstance(timing, Timing)
    assert waited == [2.0] * 5  # compilation, calibration and three rounds
    assert jax.block_until_ready(timing) == timing


OTHER = Tiles(64, 64, 256, warps=4, stages=1, cost=1.0)


@pytest.fixture
def tiles(monkeypatch):
    exact = bench_tiles.Candidate(OTHER._replace(m=128, exact=True))
    monkeypatch.setitem(bench_tiles.MORE, "interpreter", (bench_tiles.Candidate(OTHER), exact))
    return [bench_tiles.name_of(t) for t in (*TILES["interpreter"], OTHER, exact.tiles)]


def test_tiles_are_timed_and_one_is_chosen(tiles, capsys):
    bench_tiles.main(DOT)
    _, report = printed(capsys)
    chosen, other, exact = report["records"]
    assert [r["name"] for r in report["records"]] == tiles
    assert [r["chosen"] for r in report["records"]] == [True, False, False]
    assert chosen["tflops"] == 2e-12 * 32**3 / chosen["median"]
    assert other["median"] > 0
    assert exact["absent"] == "the tile does not divide the shape"


def test_tiles_with_wrong_results_get_no_time(tiles, capsys, monkeypatch):
    def wrong(*operands, tiles, launch=bench_tiles.launch, **options):
        return launch(*operands, tiles=tiles, **options) + (tiles == OTHER)

    monkeypatch.setattr(bench_tiles, "launch", wrong)
    with pytest.raises(SystemExit, match=f"failed: {tiles[1]}: wrong: differs"):
        bench_tiles.main(DOT)
    _, report = printed(capsys)
    assert ["median" in r for r in report["records"]] == [True, False, False]
