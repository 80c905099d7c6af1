"""Tables of runs trained twice, of Wgrad's rules, and of the paper's layout in tokens."""

import math
import re
import statistics

import numpy as np
import pytest
import scipy.stats

from analysis.statistics import detectable
from benchmarks.study import repeats, rules, token_tables
from benchmarks.study.cells import MULTIPLES, WGRAD_KINDS
from benchmarks.study.results import gather
from benchmarks.study.studies import RULES

_KINDS = ("wgrad_hadamard", "wgrad_rht", "wgrad_sr", "wgrad_sr34")
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


def runs(name, losses, device=H100, protocol="tuned-60m"):
    """Returns the records of a cell's seeds, such as "wgrad.floor"."""
    policy, rule = name.split(".")
    return [
        {
            "cell": f"{name}.60m.{protocol}",
            "policy": policy,
            "rules": "" if rule == "own" else rule,
            "model": "60m",
            "protocol": {"name": protocol, "lr": 3e-3},
            "seed": seed,
            "final_loss": loss,
            "evaluations": [[1, loss]],
            "device": device,
        }
        for seed, loss in enumerate(losses)
    ]


def row(table, *named):
    """Returns the numbers of the row that begins with these columns."""
    [line] = [line for line in table.splitlines() if line.startswith("| " + " | ".join(named) + " |")]
    return re.findall(r"[-+]?\d+\.\d+", line.split("|", len(named) + 1)[-1])


def columns(table, name):
    """Returns the other columns of the row that begins with this one."""
    [line] = [line for line in table.splitlines() if line.startswith(f"| {name} |")]
    return [text.strip() for text in line.split("|")[2:-1]]


def test_repeats_show_what_a_run_and_a_device_change():
    first = gather(runs("wgrad.floor", [2.0, 2.1, 2.2]) + runs("fp8.own", [1.9, 1.9]))
    again = gather(runs("wgrad.floor", [2.02, 2.09, 2.23], H200) + runs("fp8.own", [1.9, 1.92]))
    assert row(repeats.repeats(first, again), "wgrad floor, tuned-60m: repeat") == [
        "+0.0200", "-0.0100", "+0.0300", f"{math.sqrt((4 + 1 + 9) / 3 / 2) / 100:.4f}",
    ]  # fmt: skip
    found = repeats.devices(first, again)
    low, high = scipy.stats.t.interval(
        0.95, 2, loc=0.04 / 3, scale=statistics.stdev([0.02, -0.01, 0.03]) / math.sqrt(3)
    )
    assert row(found, "tuned-60m", "H200 - H100", "3")[:3] == ["+0.0133", f"{low:+.4f}", f"{high:+.4f}"]
    assert row(found, "tuned-60m", "H100 - H100", "2")[0] == "+0.0100"
    swapped = repeats.devices(again, first)
    assert row(swapped, "tuned-60m", "H200 - H100", "3")[0] == "+0.0133"


def test_claims_are_repeated_with_the_means_of_both_runs():
    first = gather(runs("wgrad.floor", [2.0, 2.1, 2.3]) + runs("fp8.own", [1.9, 1.9, 1.9]))
    again = gather(runs("wgrad.floor", [2.1, 2.1]))
    found = row(repeats.averaged(first, again), "MXFP4 in all three GEMMs costs loss (tuned-60m)", "1 of 2")
    assert found[0] == "+0.2333"
    assert found[3] == f"{statistics.fmean([2.05, 2.1, 2.3]) - 1.9:+.4f}"


def test_wgrads_rules_stand_beside_what_they_change():
    found = rules.rules(
        gather(
            runs("fprop_dgrad.even", [2.0, 2.0])
            + runs("wgrad.even", [2.1, 2.2])
            + runs("wgrad.even-even-floor", [2.4, 2.5])
            + runs("wgrad_hadamard.even-even-floor", [2.3, 2.2])
            + runs("fp8.own", [1.8, 1.8])
            + runs("only_wgrad.floor", [1.9, 2.0])
        )
    )
    mxfp4 = "MXFP4, `even`"
    assert row(found, mxfp4, "wgrad", "`even`", "2")[:2] == ["2.1500", "+0.1500"]
    plain = row(found, mxfp4, "wgrad", "`floor`", "2")
    assert (plain[1], plain[4]) == ("+0.4500", "+0.3000")  # beside no MXFP4, and beside even
    rotated = row(found, mxfp4, "wgrad_hadamard", "`floor`", "2")
    assert (rotated[1], rotated[4]) == ("+0.2500", "-0.2000")  # beside no MXFP4, and beside no remedy
    assert row(found, "FP8", "wgrad", "`floor`", "2")[:2] == ["1.9500", "+0.1500"]


def _effects(loss, without):
    """Returns the differences of every row of rules.effects; loss is by what else, kind, rule and seed."""
    of = {kind: loss[:, k] for k, kind in enumerate(WGRAD_KINDS)}
    none, h16, signs, sr, sr34 = (of[k] for k in ("wgrad", *_KINDS))
    base = without[:, None]
    remedies = [x - none for x in (h16, signs, sr, sr34)]
    return [none - base, *remedies, h16 - base, signs - h16, sr - h16, sr - signs, sr34 - sr]


def test_remedies_are_averaged_over_the_rules_by_seed():
    rng = np.random.default_rng(0)
    kinds, rules_ = list(WGRAD_KINDS), list(RULES)
    loss = 2.5 + 0.1 * rng.standard_normal((2, len(kinds), len(rules_), 4))
    without = 2.4 + 0.1 * rng.standard_normal((2, 4))
    made = runs("fprop_dgrad.even", without[0]) + runs("fp8.own", without[1])
    for k, kind in enumerate(kinds):
        for r, rule in enumerate(rules_):
            made += runs(f"{kind}.{rule if rule == 'even' else f'even-even-{rule}'}", loss[0, k, r])
            made += runs(f"only_{kind}.{rule}", loss[1, k, r])
    found = rules.effects(gather(made))
    h16 = loss[:, kinds.index("wgrad_hadamard")] - loss[:, kinds.index("wgrad")]
    clips = np.array([rule not in rules.UNCLIPPED for rule in rules_])
    parts = [h16[0].mean(0), h16[1].mean(0), h16.mean((0, 1))]
    parts += [h16[:, at].mean((0, 1)) for at in (clips, ~clips)]
    parts.append(parts[4] - parts[3])
    shown = columns(found, "H16 takes off loss")
    for text, part in zip(shown, parts, strict=False):
        low, high = scipy.stats.t.interval(0.95, 3, part.mean(), scipy.stats.sem(part))
        assert text == f"{part.mean():+.3f} ({low:+.3f} to {high:+.3f})"
    assert shown[-1] == "4"
    costs = loss[:, kinds.index("wgrad")] - without[:, None]
    assert columns(found, "Wgrad costs loss")[2].startswith(f"{costs.mean():+.3f} (")
    p = [scipy.stats.ttest_1samp(d.mean((0, 1)), 0).pvalue for d in _effects(loss, without)]
    largest = max((len(p) - rank) * x for rank, x in enumerate(sorted(p)) if x <= p[1])
    assert shown[-3] == f"{min(1.0, largest):.2g}"
    assert shown[-2] == f"{detectable(parts[2].std(ddof=1), 4):.3f}"
    made = [run for run in made if not (run["cell"].startswith("only_wgrad_sr.ceil") and run["seed"] == 3)]
    found = rules.effects(gather(made))
    assert columns(found, "stochastic rounding takes off loss")[-1] == "3"
    assert rules.effects({}) == "Not run yet: `rules-60m`."


def test_the_papers_layout_in_tokens_inverts_the_multiple():
    def loss(tokens, seed):
        return 2.0 + 8.0 * (23 * tokens) ** -0.3 + 0.01 * seed

    found = runs("wgrad.floor", [loss(0.9, s) for s in range(4)])
    found += runs("wgrad_sr.floor", [9.0] * 4)
    found += runs("fp8.own", [loss(1.0, s) for s in range(4)])
    for m in MULTIPLES:
        found += runs("fp8.own", [loss(m, s) for s in range(4)], protocol=f"tuned-60m-x{m:g}")
    layout = token_tables.paper_layout_in_tokens(gather(found))
    shown = row(layout, "Fprop, Dgrad, Wgrad; remedy on Wgrad", "`floor`")
    assert float(shown[0]) == pytest.approx(100 / 0.9 - 100, abs=0.1)
    assert "| - |" in layout  # a loss above every length has no multiple
