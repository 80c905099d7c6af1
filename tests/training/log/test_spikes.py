"""Spikes: what a practitioner sees in a trace is reported, and nothing else."""

import json

import numpy as np
import pytest

from training.log.spikes import SpikeDetector, find_spikes


def trace(steps=400, noise=0.02):
    """A run without spikes: its loss falls from 10.4 to about 3.3, its gradient norm from 8 to 0.6."""
    rng, t = np.random.default_rng(0), np.arange(1, steps + 1)
    losses = 3.1 + 7.3 * np.exp(-t / 25) + 10 / (t + 30) + noise * rng.normal(size=steps)
    norms = (0.6 + 7.4 * np.exp(-t / 40)) * np.exp(0.15 * rng.normal(size=steps))
    return losses, norms


def records(losses, norms):
    pairs = zip(losses.tolist(), norms.tolist(), strict=True)
    return [{"step": i, "loss": loss, "grad_norm": norm} for i, (loss, norm) in enumerate(pairs, 1)]


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
def test_a_run_that_learns_has_none(noise):
    assert find_spikes(records(*trace(noise=noise))) == []


def test_a_loss_or_a_norm_that_leaps_is_one_and_does_not_hide_the_next():
    losses, norms = trace()
    losses[[299, 305]], norms[299] = (4.03, 3.8), 40.0  # from 3.34; below twice the median
    losses[29] = 9.0  # from 5.3, while it falls fast
    norms[349] = 5.0
    norms[360], losses[370] = 1.1, losses[370] * 1.02  # within what one sees anyway
    losses[380] = np.nan
    found = find_spikes(records(losses, norms))
    assert [(spike.step, spike.of) for spike in found] == [
        (30, ("loss",)),
        (300, ("loss", "grad_norm")),
        (306, ("loss",)),
        (350, ("grad_norm",)),
    ]
    assert found[1].loss_median == pytest.approx(3.16, abs=0.05)
    assert found[1].grad_norm_median == pytest.approx(0.6, rel=0.1)


@pytest.mark.parametrize(("factor", "steps"), [(None, [300, 320]), (2.0, [320]), (float("inf"), [])])
def test_they_are_written_with_their_batches(tmp_path, factor, steps):
    losses, norms = trace(330)
    losses[299], losses[319] = 4.03, 7.0
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in records(losses[:290], norms[:290]))
    )
    said = []
    with SpikeDetector(
        tmp_path, factor, lambda step: (np.zeros(1), {"windows": [step]}), said.append, 290
    ) as log:
        for step in range(291, 331):
            log.check(step, losses[step - 1], norms[step - 1])
    written = [json.loads(line) for line in (tmp_path / "spikes.jsonl").read_text().splitlines()]
    assert [(spike["step"], spike["batch"]["windows"]) for spike in written] == [(s, [s]) for s in steps]
    assert len(said) == len(steps)
