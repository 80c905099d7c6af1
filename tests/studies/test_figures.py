"""studies/figures.py: the committed figures are those of the committed numbers."""

import pathlib
import re

import pytest

pytest.importorskip("matplotlib", reason="figures need matplotlib, the extra plot")

from analysis.statistics import paired_difference
from studies import figures

DRAWN = pathlib.Path(__file__).parents[2] / "docs" / "figures"


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures")
    figures.write_figures(folder)
    return folder


@pytest.mark.parametrize("name", ["ladder", "speed", "gradients", "gradient-values"])
def test_committed_figures_show_the_committed_numbers(drawn, name):
    """Compares the texts, among them every value; other versions of matplotlib may place them elsewhere."""
    new, old = ((folder / f"{name}.svg").read_text() for folder in (drawn, DRAWN))
    assert re.findall(r">([^<>]+)</text>", new) == re.findall(r">([^<>]+)</text>", old), (
        "run python -m studies.figures"
    )


def test_the_same_numbers_give_the_same_files(drawn, tmp_path):
    figures.write_figures(tmp_path)
    for path in drawn.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def run(policy, rules, seed, loss, evaluations=()):
    return {
        "cell": f"{policy}.{rules}",
        "policy": policy,
        "rules": rules,
        "seed": seed,
        "model": "60m",
        "protocol": {"name": "tuned-60m"},
        "final_loss": loss,
        "evaluations": [*evaluations, (1, loss)],
    }


def test_ladder_points_are_differences_to_fp8():
    base, other = [3.0, 3.1, 3.2], [3.1, 3.3, 3.25]
    runs = [run("fp8", "", seed, loss) for seed, loss in enumerate(base)]
    runs += [run("wgrad", "floor", seed, loss) for seed, loss in enumerate(other)]
    runs.append(run("wgrad", "floor", 3, 5.0, [(0, 3.0)]))
    runs.append(run("wgrad", "even", 0, 3.0))  # alone
    [point] = figures.ladder_points(runs)
    wanted = paired_difference(dict(enumerate(other)), dict(enumerate(base)))
    assert point == ("wgrad", "floor", wanted, 1)
