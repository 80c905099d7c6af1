"""The benchmarks end to end on tiny shapes: their reports, and that wrong results get no times."""

import contextlib
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest
from support.marks import parametrize

from benchmarks.kernels import attention, context, dot, quantize, ragged
from mxjax.kernels.selftest import tune_gemm
from mxjax.kernels.selftest.measured import Timing, measure

UNEVEN = ("2x64x2x1x64", "1x63x2x1x64")
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
    monkeypatch.setitem(dot.LINEARS, "tiny", (32, 32))


ONCE = ["--rounds", "1", "--commit", "abc"]
QUANTIZE, DOT = ["--shapes", "32x64", *ONCE], ["--tokens", "32", "--linears", "tiny", *ONCE]
GEMM = ["--tokens", "64", "--gemms", "tiny.fprop", *ONCE]


@pytest.fixture
def report(capsys):
    """Returns a function that runs a benchmark and returns the lines that it prints and its report.

    If results are wrong, `failed` is a pattern of what the benchmark says in the end.
    """

    def report(benchmark, *flags, failed=None):
        with pytest.raises(SystemExit, match=failed) if failed else contextlib.nullcontext():
            benchmark.main([*flags])
        lines = capsys.readouterr().out.strip().splitlines()
        found = json.loads(lines[-1])
        assert set(found) - {"devices"} == HEADER
        return lines, found

    return report


@pytest.mark.slow
def test_quantize_reports_every_line_with_its_time_or_why_there_is_none(report, tmp_path):
    only = ["copy", "columns, to bfloat16", "rows, "]
    lines, found = report(quantize, *QUANTIZE, "--only", *only, "--out", str(tmp_path / "numbers.json"))
    assert found["commit"] == "abc"
    assert "none" not in found["kernels"]
    assert found["command"].startswith("python -m benchmarks.kernels.quantize --shapes 32x64 ")
    records = {r["name"]: r for r in found["records"]}
    assert records["rows, jax.numpy"]["work"] == 2 * 32 * 64 + 32 * 64 // 2 + 64
    values = records["both, H16 on columns, to bfloat16"]
    assert values["work"] == 3 * 2 * 32 * 64
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
    assert json.loads((tmp_path / "numbers.json").read_text()) == found


def test_quantize_times_nothing_that_is_not_the_definition(monkeypatch, report):
    right = quantize.prepare
    monkeypatch.setattr(quantize, "prepare", lambda x, uses: right(x.at[0, 0].set(100), uses))
    failed = r"failed: rows: AssertionError: \d+ of 1024 differ from the definition"
    _, found = report(quantize, *QUANTIZE, "--only", "rows", failed=failed)
    [record] = [r for r in found["records"] if r["name"] == "rows"]
    assert set(record) == {"shape", "name", "work", "is_ceiling", "absent"}


@pytest.mark.slow
def test_dot_reports_rates_and_distances(report):
    flags = ["--policies", "wgrad", "--implementations", "fp8_carriers", "--peers", "qwix QtProvider, fp8"]
    lines, found = report(dot, *DOT, *flags)
    baseline, ours, peer = found["records"]
    assert (baseline["name"], baseline["is_ceiling"]) == ("jnp.dot, bfloat16", True)
    assert (ours["work"], baseline["error"]) == (6 * 32**3, 0)
    assert 0.05 < ours["error"] < 0.3
    share = baseline["median"] / ours["median"]
    assert any(f"| {share:.0%} |" in " ".join(line.split()) for line in lines if "wgrad" in line)
    assert peer["absent"].startswith("ModuleNotFoundError")


def test_dot_times_nothing_that_is_not_the_reference(monkeypatch, report):
    right = dot.mxjax.dot

    def wrong(x, w, *, implementation, **options):
        y = right(x, w, implementation=implementation, **options)
        return y if implementation == "reference" else 1.1 * y

    monkeypatch.setattr(dot.mxjax, "dot", wrong)
    failed = "failed: fp8, xla: AssertionError: it differs from the reference"
    flags = ["--policies", "fp8", "--implementations", "xla", "--peers", "none"]
    assert "median" not in report(dot, *DOT, *flags, failed=failed)[1]["records"][1]


def test_dot_starts_no_line_after_its_seconds(report):
    _, found = report(dot, *DOT, "--policies", "wgrad", "--peers", "none", "--seconds", "0")
    late = [r["name"] for r in found["records"] if "absent" in r]
    assert late == ["jnp.dot, bfloat16", "wgrad, xla", "wgrad, fp8_carriers"]


# The second takes a minute in the interpreter.
@parametrize("implementations", slow=[["xla"]], exhaustive=[["xla", "fp8_carriers"]], ids=" ".join)
def test_ragged_reports_every_case_with_its_time_or_why_there_is_none(implementations, report):
    sizes = ["--rows", "256", "--widths", "32", "64", "--sizes", "skewed", "--policies", "wgrad"]
    lines, found = report(ragged, *sizes, "--rounds", "1", "--implementations", *implementations)
    records = found["records"]
    timed = [r["name"] for r in records if "absent" not in r]
    assert [f"mxjax wgrad, {name}" for name in implementations] == [n for n in timed if "mxjax" in n]
    assert all(sum(r["sizes"]) == 256 and len(r["sizes"]) == 8 for r in records)
    assert all(r.get("median", 1) > 0 for r in records)
    assert lines[0].startswith("skewed: rows of the experts [")


@pytest.mark.slow
def test_gemm_times_every_candidate_and_writes_the_fastest(report, tmp_path, monkeypatch):
    monkeypatch.setitem(dot.LINEARS, "tiny", (256, 64))
    lines, found = report(tune_gemm, *GEMM, "--table", str(tmp_path / "tiles.json"))
    records = found["records"]
    assert [r["by"] for r in records] == ["jnp.dot, bfloat16", "jnp.dot, FP8", "mxjax", "mxjax"]
    assert all(0 < r["p10"] <= r["median"] <= r["p90"] for r in records)
    table = json.loads((tmp_path / "tiles.json").read_text())
    [entry] = table["gemms"]
    fastest = min(records[2:], key=lambda r: r["median"])
    assert (entry["gemm"], entry["tile"]) == ([64, 64, 256, 1], fastest["tile"])
    assert any("tile table: " in line for line in lines)


def test_gemm_times_no_candidate_with_wrong_bits(monkeypatch, report, tmp_path):
    monkeypatch.setitem(dot.LINEARS, "tiny", (256, 64))
    right = tune_gemm.launch

    def wrong(*operands_and_more):
        tiles = operands_and_more[-1]
        y = right(*operands_and_more)
        return y.at[0, 3, 5].set(jnp.nan) if tiles.m == 64 else y

    monkeypatch.setattr(tune_gemm, "launch", wrong)
    failed = r"failed: tiny\.fprop, 64x64x256.*: AssertionError: 1 of 4096 elements are wrong"
    _, found = report(tune_gemm, *GEMM, "--table", str(tmp_path / "tiles.json"), failed=failed)
    assert [set(r) for r in found["records"] if r["by"] == "mxjax"][1] >= {"absent"}
    [entry] = json.loads((tmp_path / "tiles.json").read_text())["gemms"]
    assert entry["tile"][0] == 128


@pytest.mark.slow
def test_attention_times_every_candidate_and_the_whole(report):
    lines, found = report(attention, "--shapes", "1x19x2x1x64", *ONCE)
    timed = [(r["which"], r["by"]) for r in found["records"] if "absent" not in r]
    passes = ("forward", "forward and backward")
    whole = [(which, by) for which in passes for by in ("xla", "mxjax")]
    whole += [(which, "mxjax") for which in passes * 4]  # causal, documents, two windows
    assert timed == [(which, "mxjax") for which in ("forward", "key_gradients", "query_gradients")] + whole
    assert sum("absent: " in line for line in lines) == 6  # cuDNN


@pytest.mark.slow
def test_attention_times_nothing_that_is_wrong(monkeypatch):
    monkeypatch.setattr(attention.launches, "forward", lambda q, k, v, *_, **__: (1.5 * q, None))
    [case, *_] = attention.kernel_cases(attention.Shape(1, 19, 2, 1, 64))
    with pytest.raises(AssertionError, match="differs from the float32 reference"):
        case.check()


@pytest.mark.slow
def test_context_times_every_way_to_share_a_sequence(report):
    _, found = report(context, "--shapes", "1x64x2x1x64", *ONCE)
    assert "devices" in found
    ways = ("one device", "ring", "all-to-all")
    timed = [(r["which"], r["by"]) for r in found["records"] if "absent" not in r]
    assert timed == [(which, by) for which in ("forward", "forward and backward") for by in ways]


@pytest.mark.parametrize(
    ("benchmark", "shape", "message"),
    [
        *((context, shape, "--shapes needs one sequence, of a multiple of 2 tokens") for shape in UNEVEN),
        *((attention, shape, repr(shape)) for shape in ("1x33", "1x33x3x2x64", "1x33x2x1x96", "axb")),
    ],
)
def test_shapes_that_cannot_be_are_refused(benchmark, shape, message, capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["--shapes", shape])
    assert message in capsys.readouterr().err


def test_measure_waits_for_the_last_call_alone():
    waited = []
    timing = measure(
        lambda x: x + 1, jnp.float32(1), rounds=3, round_seconds=1e-6, wait=lambda r: waited.append(float(r))
    )
    assert isinstance(timing, Timing)
    assert waited == [2.0] * 5  # compilation, calibration and three rounds
    assert jax.block_until_ready(timing) == timing


def test_the_table_of_attention_kernels_is_generated():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "attention.md").read_text()
    command = "python -m benchmarks.kernels.attention --page docs/attention.md"
    assert attention.insert(page, {"kernels": attention.kernels_table()}) == page, command
