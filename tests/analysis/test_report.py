"""The report: its numbers are the files', it loads nothing, and a browser shows it on a narrow screen."""

import dataclasses
import functools
import html.parser
import json
import math
import re
import shlex
import shutil
import subprocess

import numpy as np
import pytest

import eval as evaluation_program
from analysis.report.chart import Line, Scale, chart
from analysis.report.report import ReportConfig
from models import decoder
from models.configs import get_config, to_dict
from training.command_line import command_of, parse
from training.log.metrics import json_line, read_records
from training.phases import phases_of, to_record
from training.run.record import to_json, write_run_config

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SECTIONS = ["Losses", "Gradient norms and spikes", "SQNR by layer", "Speed and memory", "Samples"]
SECTIONS += ["Policy by layer", "Model", "Data", "To repeat it"]


class Page(html.parser.HTMLParser):
    """Headings, text and attributes of a page whose elements are closed in order."""

    VOID = frozenset({"meta"})

    def __init__(self, text):
        super().__init__()
        self.open, self.headings, self.attributes, self.text = [], [], [], ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.attributes += attributes
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)
        if "style" not in self.open:
            self.text += data


COMMIT = "0123456789abcdef-dirty"
GEMMS = ("fprop", "dgrad", "wgrad")
FACTS = {"source": "a <b> & c", "train_tokens": 10**6, "validation_tokens": 9000, "crc32": "0f"}


def make_run(folder, policy, seed, measured):
    """Writes a run of 40 steps with a spike in step 30; if `measured`, with MFU, memory and SQNR."""
    config = parse(["--policy", policy, "--steps", "40", "--layers", "head=fp8", "--out", str(folder)])
    model = dataclasses.replace(get_config("tiny"), vocab_size=257)
    phases = phases_of(config.precision, 40, functools.partial(decoder.layer_policies, model))
    environment = {"device": "cpu", "devices": 2, "commit": COMMIT}
    parts = {"model": to_dict(model), "data": FACTS, "environment": environment}
    write_run_config(folder, {"config": to_json(config)} | to_record(phases) | parts)
    rng, records = np.random.default_rng(seed), []
    for step in range(1, 41):
        noise = rng.normal()
        values = {"loss": 6 * step**-0.2 + 0.01 * noise, "grad_norm": math.exp(0.1 * noise), "lr": 1e-3}
        values |= {"step_s": 9.0 if step == 1 else 0.5, "tokens_per_s": 4096.0, "tflops_per_device": 1.0}
        values |= {"mfu": 0.4213, "memory_peak_bytes": 3 * 2**30} if measured else {}
        values |= {"loss": 5.5, "grad_norm": 40.0} if step == 30 else {}
        records.append({"step": step} | values)
        if step % 20 == 0 and measured:
            kinds = ("attention.qkv", "mlp.down")
            layers = {
                f"blocks.{i}.{kind}": {g: {"sqnr_db": 20 + 5 * rng.random()} for g in GEMMS}
                for i in range(4)
                for kind in kinds
            }
            records.append({"step": step, "policy": policy, "layers": layers})
        if step % 20 == 0:
            loss = 3 + rng.random()
            bits = {"eval_bits_per_byte": loss / 3, "eval_tokens": 9} if measured else {"eval_tokens": 9}
            records.append({"step": step, "eval_loss": loss, "eval_perplexity": math.exp(loss)} | bits)
    (folder / "metrics.jsonl").write_text("".join(json_line(record) + "\n" for record in records))
    return folder, records


@pytest.fixture
def runs(tmp_path):
    for name in ("own", "base"):
        (tmp_path / name).mkdir()
    return make_run(tmp_path / "own", "wgrad", 0, True), make_run(tmp_path / "base", "bf16", 1, False)


def write(*arguments):
    evaluation_program.main(["report", *map(str, arguments)])


def test_a_report_says_what_the_run_s_files_say(runs, tmp_path, capsys):
    (own, records), (base, others) = runs
    write(own, base, "--out", tmp_path / "report.html", "--json")
    out = str(tmp_path / "report.html")
    assert json.loads(capsys.readouterr().out) == {"out": out, "runs": ["own", "base"], "samples": 0}
    page = Page((tmp_path / "report.html").read_text())
    assert page.headings == ["Comparison", *SECTIONS]
    evaluated = [r for r in records if "eval_loss" in r]
    layers = [r for r in records if "layers" in r][-1]["layers"]
    wanted = [f"{r['eval_loss']:.4f}" for r in evaluated] + [
        f"{r['eval_bits_per_byte']:.4f}" for r in evaluated
    ]
    wanted += [f"{layer[gemm]['sqnr_db']:.1f}" for layer in layers.values() for gemm in GEMMS]
    wanted.append(f"{evaluated[-1]['eval_loss'] - others[-1]['eval_loss']:+.4f}")
    wanted += ["4,096", "42.1 %", "3 GiB", "5.5000", "853,376", "a <b> & c", "2 x cpu", COMMIT]
    wanted.append("fprop fp8_e4m3 x fp8_e4m3")
    assert [text for text in wanted if text not in page.text] == []
    loading = {"src", "href", "srcset", "data", "action", "onload"}
    assert loading.isdisjoint(name for name, _ in page.attributes)
    assert not re.search(r"https?:|@import|url\(|<script", (tmp_path / "report.html").read_text())


def test_a_length_of_samples_without_prompts_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--tokens 9 is for samples: add --prompts TEXT, or leave it out"):
        ReportConfig((tmp_path,), tmp_path / "r.html", tokens=9)


def test_what_is_not_on_record_is_left_out_with_how_to_get_it(runs, tmp_path):
    base = runs[1][0]
    write(base, "--out", tmp_path / "r.html")
    page = Page((tmp_path / "r.html").read_text())
    assert page.headings == SECTIONS
    hints = "train with: --stats-every 100", "--prompts TEXT", "No MFU", "No memory", "No bits per byte"
    assert [said for said in hints if said not in page.text] == []
    records = read_records(base)
    (base / "metrics.jsonl").write_text("".join(f'{{"step": {r["step"]}, "loss": 2}}\n' for r in records))
    write(base, "--out", tmp_path / "r.html")  # of a version without durations
    assert "first step" not in (tmp_path / "r.html").read_text()
    write(base, "--out", tmp_path / "r.html")  # over a report
    with pytest.raises(SystemExit, match="holds no run"):
        write(tmp_path, "--out", tmp_path / "r.html")
    saved = (base / "config.json").read_bytes()
    for out in (base / "config.json", "/dev/null"):
        with pytest.raises(SystemExit, match=f"--out {out} exists and is no report; name another file"):
            write(base, "--out", out)
    with pytest.raises(SystemExit, match=r"a{300}.*: File name too long"):
        write(base, "--out", tmp_path / ("a" * 300))
    assert (base / "config.json").read_bytes() == saved
    (base / "metrics.jsonl").unlink()
    with pytest.raises(SystemExit, match="has no step on record"):
        write(base, "--out", tmp_path / "r.html")


def test_what_is_infinite_is_said_of_losses_and_exact_of_decibels(runs, tmp_path):
    (own, records), (base, _) = runs
    exact = {gemm: {"sqnr_db": math.inf} for gemm in GEMMS}
    records += [{"step": 40, "loss": math.inf, "grad_norm": math.inf, "layers": {"blocks.0.mlp.down": exact}}]
    (own / "metrics.jsonl").write_text("".join(json_line(record) + "\n" for record in records))
    write(own, base, "--out", tmp_path / "r.html")
    rows = dict(re.findall("<tr><td>([^<]*)</td>(.*?)</tr>", (tmp_path / "r.html").read_text()))
    for name, value in (("gradient norm at the end", "inf"), ("SQNR of wgrad in dB", "exact")):
        first, *_, difference = re.findall("<td>([^<]*)</td>", rows[name])
        assert (first, difference) == (value, "-")


@pytest.mark.parametrize(
    "flags",
    [
        "--policy fp8 --layers head=bf16 'blocks[:1].*=bf16' --seed 3",
        "--policy wgrad --set wgrad.rhs.rounding=stochastic --set 'fprop.*.scale_rule=even' --tensorboard",
        "--data 0.5 /a 0.5 '/b c' --eval-data x=/d y=/e --clip inf --steps 20 --warmup-steps 3",
        "--preset mlperf-llama3.1-8b --data /a --eval-data /b --batch-size 16 --no-mllog",
    ],
)
def test_the_command_of_a_run_has_its_flags(flags):
    config = parse([*shlex.split(flags), "--out", "/run"])
    program, name, *words = shlex.split(command_of(config, "/run"))
    assert (program, name) == ("python", "train.py")
    assert parse(words) == config


@pytest.mark.parametrize(
    ("scale", "ticks"),
    [
        (Scale(0, 102_400, 0, 1), [0, 50_000, 100_000]),
        (Scale(1.93, 4.4, 0, 1), [2, 3, 4]),
        (Scale(0.5, 28, 0, 1, logarithmic=True), [0.5, 1, 2, 5, 10, 20]),
    ],
)
def test_ticks_are_round(scale, ticks):
    assert scale.ticks() == pytest.approx(ticks)


def test_a_chart_without_finite_points_has_no_line():
    found = chart("a < b", [Line("x", {1: float("nan"), 2: float("inf")}), Line("y", {})], logarithmic=True)
    assert "a &lt; b" in found
    assert "nan" not in found
    assert 'd=""' in found


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_browser_shows_it_on_a_narrow_screen(runs, tmp_path):
    write(*(folder for folder, _ in runs), "--out", tmp_path / "r.html")
    script = """
      const inner = frames[0].document, wide = inner.documentElement.scrollWidth;
      const lines = [...inner.querySelectorAll("svg.chart path.line")].map(p => p.getBBox().width);
      document.title = JSON.stringify([wide, inner.querySelectorAll("section").length, lines[0]]);
    """
    srcdoc = html.escape((tmp_path / "r.html").read_text())
    frame = f'<iframe srcdoc="{srcdoc}" style="width:360px;height:640px"></iframe>'
    (tmp_path / "phone.html").write_text(f"<body onload='{html.escape(script)}'>{frame}</body>")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}"]
    command = [BROWSER, *options, "--dump-dom", (tmp_path / "phone.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    title = re.search("<title>(.*?)</title>", done.stdout)
    assert title is not None, done.stderr[-2000:]
    wide, sections, line = json.loads(html.unescape(title[1]))
    assert wide <= 360
    assert sections == len(SECTIONS) + 1
    assert line > 300  # of 440
