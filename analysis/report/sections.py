"""The sections of a report, each from what the runs have on record; the first run is the reported one."""

import html
import math
from collections.abc import Callable, Mapping, Sequence

from analysis.records import binned, decibels, kinds_of, mean_sqnr
from analysis.report.chart import Line, chart
from analysis.report.page import (
    NONE,
    beside,
    bytes_of,
    details,
    missing,
    number,
    percent,
    preformatted,
    section,
    short_number,
    table,
    tiles,
)
from analysis.runs import RecordedRun
from mxjax.policy import OPERANDS
from training.command_line import command_of, settings_of
from training.log.spikes import Spike
from training.log.throughput import PEAK_FLOPS
from training.run.record import model_of

Runs = Sequence[RecordedRun]
Values = Sequence[float | None]
_EARLY = 0.05  # share of a run whose losses may lie above a chart
_SHOWN = 20  # spikes in a table


def overview(runs: Runs) -> str:
    """Returns the numbers that come first."""
    run = runs[0]
    first, last = next(iter(run.sets), ""), run.last_of(next(iter(run.sets), ""))
    of = f" on {first}" if first else ""
    pairs = [
        (number(last.get("eval_loss")), f"validation loss{of}, nats a token"),
        (number(last.get("eval_perplexity"), ".3f"), f"perplexity{of}"),
        (number(last.get("eval_bits_per_byte")), f"bits per byte{of}"),
        (f"{run.tokens(run.last_step):,}", "tokens trained on"),
        (number(run.tokens_per_s, ",.0f"), "tokens/s, median step"),
        (percent(run.median("mfu")), "MFU, of the dense BF16 peak"),
        (bytes_of(run.largest("memory_peak_bytes")), "peak memory a device"),
        (str(len(run.spikes)), "spikes"),
    ]
    return tiles((value, name) for value, name in pairs if value != NONE)


def lead(run: RecordedRun) -> str:
    """Returns the line below the title: model, policy, length and state of the run."""
    config, environment = run.config, run.saved.get("environment", {})
    steps = f"{run.last_step:,} of {config.steps:,} steps"
    on = f"{environment.get('devices', 1)} x {environment.get('device', 'an unknown device')}"
    text = f"{config.model_name} in {config.precision.label}, {steps}, on {on}"
    return f'<p class="soft">{html.escape(text)}</p>'


def losses(runs: Runs) -> str:
    """Returns the curves of the losses, and the evaluations of the first run."""
    run = runs[0]
    training = [Line(one.name, binned(one.curve("loss")), i) for i, one in enumerate(runs)]
    figures = [chart("Training loss, nats a token", training, skip=_EARLY)]
    names = list(dict.fromkeys(name for one in runs for name in one.sets))
    for name in names:
        lines = [
            Line(one.name, {one.tokens(n): e["eval_loss"] for n, e in one.sets[name].items()}, i, marked=True)
            for i, one in enumerate(runs)
            if name in one.sets
        ]
        figures.append(chart(f"Validation loss{f' on {name}' if name else ''}", lines, skip=_EARLY))
    parts = [beside(*figures), f'<p class="note">Losses of the first {100 * _EARLY:g} % may lie above.</p>']
    if not run.sets:
        again = f"python train.py --resume --out {run.folder}"
        return section("Losses", *parts, missing("The run has not been evaluated yet; continue it", again))
    header = ["step", "tokens"]
    for name in run.sets:
        header += [f"loss {name}", f"perplexity {name}", f"bits per byte {name}"]
    steps = sorted({step for one in run.sets.values() for step in one})
    rows = []
    for step in steps:
        of_step = [one.get(step, {}) for one in run.sets.values()]
        rows.append([f"{step:,}", f"{run.tokens(step):,}"])
        for one in of_step:
            rows[-1] += [number(one.get("eval_loss")), number(one.get("eval_perplexity"), ".3f")]
            rows[-1].append(number(one.get("eval_bits_per_byte")))
    if not any("eval_bits_per_byte" in run.last_of(name) for name in run.sets):
        parts.append(missing("No bits per byte: no PREFIX.tokenizer.json says how many bytes a token has."))
    parts.append(details(f"All {len(rows)} evaluations", table([h.strip() for h in header], rows)))
    return section("Losses", *parts)


def gradients(runs: Runs) -> str:
    """Returns the curves of gradient norms and learning rates, and the spikes of the first run."""
    norms = [Line(run.name, binned(run.curve("grad_norm")), i) for i, run in enumerate(runs)]
    rates = [Line(run.name, binned(run.curve("lr")), i) for i, run in enumerate(runs)]
    norm = "Gradient norm before clipping"
    figures = beside(chart(norm, norms, logarithmic=True), chart("Learning rate", rates, from_zero=True))
    return section("Gradient norms and spikes", figures, _spikes(runs[0]))


def _spikes(run: RecordedRun) -> str:
    if not run.spikes:
        return "<p>No loss and no gradient norm stands out from the 100 steps before it.</p>"

    def distance(spike: Spike) -> float:
        return max(spike.loss_deviations, spike.grad_norm_deviations)

    shown = sorted(sorted(run.spikes, key=distance)[-_SHOWN:], key=lambda spike: spike.step)
    rows = [
        [
            f"{spike.step:,}",
            f"{spike.loss:.4f}",
            f"{spike.loss_median:.4f}",
            f"{spike.loss_deviations:+.1f}",
            f"{spike.grad_norm:.4g}",
            f"{spike.grad_norm_median:.4g}",
            f"{spike.grad_norm_deviations:+.1f}",
        ]
        for spike in shown
    ]
    header = ["step", "loss", "median", "deviations", "gradient norm", "median", "deviations"]
    of_all = f" The {_SHOWN} largest are shown." if len(run.spikes) > _SHOWN else ""
    text = (
        f"<p>{len(run.spikes)} step{'s' * (len(run.spikes) > 1)} above the 100 before by more than 6 "
        f"deviations of the loss or of the gradient norm's logarithm.{of_all} spikes.jsonl has the "
        "batches of those that the run reported.</p>"
    )
    return text + table(header, rows)


def speed(runs: Runs) -> str:
    """Returns speed and memory over the run."""
    run = runs[0]

    def lines(name: str) -> list[Line]:
        found = [Line(one.name, binned(one.curve(name)), i) for i, one in enumerate(runs)]
        return [line for line in found if line.points]

    figures = [chart("Tokens/s, mean of 10 steps", lines("tokens_per_s"), from_zero=True)]
    parts, has_mfu = [], run.curve("mfu")
    if has_mfu:
        figures.append(chart("MFU, of the dense BF16 peak", lines("mfu"), from_zero=True, percent=True))
    else:
        figures.append(chart("Model TFLOP/s a device", lines("tflops_per_device"), from_zero=True))
        known = ", ".join(name.replace("|", ", ") for name in PEAK_FLOPS)
        parts.append(missing(f"No MFU: the peak of this device is unknown; known are {known}."))
    seconds = [duration for _, duration in sorted(run.curve("step_s").items())]
    rows = []
    if seconds:
        rows = [
            ["first step, which compiles", f"{seconds[0]:.1f} s"],
            ["median of the others", f"{number(run.median('step_s'))} s"],
            ["all steps, without evaluations and checkpoints", f"{sum(seconds):,.0f} s"],
        ]
    if run.curve("memory_peak_bytes"):
        rows.append(["peak memory a device", bytes_of(run.largest("memory_peak_bytes"))])
    else:
        parts.append(
            missing("No memory: the device does not report it; train.py prints an estimate at its start.")
        )
    return section("Speed and memory", beside(*figures), table([], rows), *parts)


def sqnr(runs: Runs) -> str:
    """Returns the SQNR of every GEMM of the first run by layer, and in means over the layers by tokens."""
    run, title = runs[0], "SQNR by layer"
    if not run.sqnr:
        return section(title, missing("Not measured; train with", "--stats-every 100"))
    step = max(run.sqnr)
    found = run.sqnr[step]
    figures = [
        chart(
            f"{gemm.capitalize()}, mean of layers, dB",
            [
                Line(one.name, _finite(one.sqnr_curve(gemm)), i, marked=True)
                for i, one in enumerate(runs)
                if one.sqnr
            ],
        )
        for gemm in OPERANDS
    ]
    kinds = kinds_of([found])
    blocks = sorted({int(name.split(".")[1]) for name in found})
    values = [v for layer in found.values() for v in layer.values() if math.isfinite(v)]
    low, high = min(values, default=0.0), max(values, default=1.0)

    def cell(layer: Mapping[str, float], gemm: str) -> str:
        value = layer.get(gemm, math.nan)
        share = 0.6 * (1 - (value - low) / (high - low or 1)) if math.isfinite(value) else 0
        return f'<td class="heat" style="--share:{share:.2f}">{decibels(value)}</td>'

    head = "".join(f"<th colspan={len(OPERANDS)}>{html.escape(kind)}</th>" for kind in kinds)
    below = "".join(f"<th>{gemm}</th>" for _ in kinds for gemm in OPERANDS)
    rows = "".join(
        f"<tr><td>{block}</td>"
        + "".join(cell(found.get(f"blocks.{block}.{kind}", {}), gemm) for kind in kinds for gemm in OPERANDS)
        + "</tr>"
        for block in blocks
    )
    grid = f'<div class="scroll"><table><thead><tr><th>block</th>{head}</tr><tr><th></th>{below}</tr></thead>'
    text = (
        f"<p>Signal to quantization noise of each product against float32 before step {step:,}, in dB: 6 dB "
        "are half the error. The deeper the color, the noisier.</p>"
    )
    return section(title, beside(*figures), text, f"{grid}<tbody>{rows}</tbody></table></div>")


def _finite(points: Mapping[int, float]) -> dict[int, float]:
    return {x: v for x, v in points.items() if math.isfinite(v)}


def samples(run: RecordedRun, texts: Sequence[tuple[str, str]], command: str) -> str:
    """Returns the section of prompts and their continuations by the run's model.

    Args:
      texts: pairs of a prompt and its continuation.
      command: what generates them.
    """
    if not texts:
        return section("Samples", missing("None asked for; add prompts to the report with", command))
    body = "".join(
        f"<pre><strong>{html.escape(prompt)}</strong>{html.escape(text)}</pre>" for prompt, text in texts
    )
    return section("Samples", body, f'<p class="note">By <code>{html.escape(command)}</code></p>')


def policies(run: RecordedRun) -> str:
    """Returns the policy of every layer in each phase of the run."""
    parts = []
    for phase in run.phases:
        parts.append(f"<p>{html.escape(phase.policy)}, from step {phase.first_step:,}</p>")
        lines = [line.partition(": ")[::2] for line in str(phase.layers).splitlines()]
        rows = [[layers, *(gemm.strip() for gemm in policy.split("|"))] for layers, policy in lines]
        longest = max(len(row) for row in rows)
        rows = [row + [""] * (longest - len(row)) for row in rows]
        parts.append(table([], rows, words=range(longest)))
    if not parts:
        parts = [missing("Not on record: train.py has not begun this run.")]
    return section("Policy by layer", *parts)


def model_and_data(run: RecordedRun) -> str:
    """Returns the model's shape, the data and how much of it the run has read."""
    model, data, config = model_of(dict(run.saved)), run.saved.get("data", {}), run.config
    tokens = run.tokens(run.last_step)
    shape = {name: value for name, value in run.saved["model"].items() if value not in (None, False, [])}
    flops = model.flops_per_token(config.data.seq_len, config.lora is not None)
    rows = [
        ["parameters", f"{model.n_params:,}"],
        ["FLOPs a token", f"{flops:,.0f}"],
        ["FLOPs of the run", f"{flops * tokens:.3g}"],
        ["tokens a parameter", f"{tokens / model.n_params:.2f}"],
        *([name.replace("_", " "), value] for name, value in shape.items() if name != "parameters"),
    ]
    if data:
        sources = [f"{name or 'validation'}: {path}" for name, path in config.data.eval_paths.items()]
        read = [
            ["training data", data["source"]],
            ["training tokens", f"{data['train_tokens']:,}"],
            ["epochs", f"{tokens / data['train_tokens']:.3g}"],
            ["validation tokens", f"{data['validation_tokens']:,}"],
            ["CRC32", data["crc32"]],
            ["sequences a step, tokens a sequence", f"{config.data.batch_size} x {config.data.seq_len}"],
            *(["evaluated on", source] for source in sources),
        ]
    else:
        read = []
    return beside(section("Model", table([], rows, words=[1])), section("Data", table([], read, words=[1])))


def repeat(run: RecordedRun) -> str:
    """Returns the command, versions and hardware of the run, and the files that its policies came from."""
    environment = {**run.saved.get("environment", {}), "implementation": run.saved.get("implementation")}
    mesh = {name: size for name, size in run.saved.get("mesh", {}).items() if size > 1}
    rows = [[name, str(value)] for name, value in environment.items() if value is not None]
    rows.append(["mesh", ", ".join(f"{name}={size}" for name, size in mesh.items()) or "1 device"])
    files = [
        [path, f"{size} bytes, CRC32 {crc32}"]
        for path, (size, crc32) in run.saved.get("policy_files", {}).items()
    ]
    parts = [preformatted(command_of(run.config, "NEW"))]
    if files:
        parts.append(table(["policy file", "as the run began"], files, words=[1]))
    parts += [table([], rows, words=[1])]
    flags = [[f"--{name.replace('_', '-')}", value] for name, value in settings_of(run.config).items()]
    parts.append(details("Every flag", table([], flags, words=[1])))
    return section("To repeat it", *parts)


def comparison(runs: Runs) -> str:
    """Returns a table of the runs' numbers, losses after equally many tokens, and settings that differ."""
    peaks = [run.largest("memory_peak_bytes") for run in runs]
    measures: dict[str, Values] = {
        "last training loss": [run.last_mean("loss") for run in runs],
        "gradient norm at the end": [run.last_mean("grad_norm") for run in runs],
        "tokens/s": [run.tokens_per_s for run in runs],
        "MFU in %": [None if (mfu := run.median("mfu")) is None else 100 * mfu for run in runs],
        "peak memory in GiB": [peak and peak / 2**30 for peak in peaks],
        "spikes": [float(len(run.spikes)) for run in runs],
    }
    measures = {**_evaluations(runs), **measures}
    sqnr = {f"SQNR of {gemm} in dB": [_last_sqnr(run, gemm) for run in runs] for gemm in OPERANDS}
    rows = _rows(measures, short_number) + _rows(sqnr, lambda value: decibels(value) or NONE)
    others = [f"{runs[0].name} - {run.name}" for run in runs[1:]]
    parts = [table(["", *(run.name for run in runs), *others], rows)]
    if len({run.held_out for run in runs}) > 1:
        parts.append('<p class="note">The runs are evaluated on different tokens.</p>')
    settings = [settings_of(run.config) for run in runs]
    names = [name for name in settings[0] if len({one.get(name) for one in settings}) > 1]
    if names:
        rows = [[f"--{name.replace('_', '-')}", *(one.get(name, "") for one in settings)] for name in names]
        parts.append("<p>Settings that differ:</p>")
        parts.append(table(["", *(run.name for run in runs)], rows, words=range(1, len(runs) + 1)))
    return section("Comparison", *parts)


def _evaluations(runs: Runs) -> dict[str, Values]:
    """Returns losses and bits per byte of the sets that all runs have, after equally many tokens."""
    found: dict[str, Values] = {}
    for name in runs[0].sets:
        if not all(name in run.sets for run in runs):
            continue
        by_tokens = [{run.tokens(n): one for n, one in run.sets[name].items()} for run in runs]
        if not (common := set.intersection(*map(set, by_tokens))):
            continue
        at = max(common)
        where = f"{f' on {name}' if name else ''} after {at:,} tokens"
        found[f"validation loss{where}"] = [one[at]["eval_loss"] for one in by_tokens]
        found[f"bits per byte{where}"] = [one[at].get("eval_bits_per_byte") for one in by_tokens]
    return found


def _rows(measures: Mapping[str, Values], form: Callable[[float | None], str]) -> list[list[str]]:
    """Returns a row for each number that a run has, with the differences from the first run's."""
    return [
        [name, *map(form, values), *_differences(values)]
        for name, values in measures.items()
        if any(value is not None for value in values)
    ]


def _differences(values: Values) -> list[str]:
    finite = [None if value is None or not math.isfinite(value) else value for value in values]
    own = finite[0]
    return [NONE if own is None or other is None else short_number(own - other, "+") for other in finite[1:]]


def _last_sqnr(run: RecordedRun, gemm: str) -> float | None:
    found = mean_sqnr([run.sqnr[max(run.sqnr)]])[gemm] if run.sqnr else math.nan
    return None if math.isnan(found) else found
