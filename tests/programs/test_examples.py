"""The programs in examples/ run, and what they print is what they promise."""

import os
import pathlib
import resource
import runpy
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
TRAINING = sorted(path for path in EXAMPLES.glob("*.py") if path.stem != "own_policy")


def run(name):
    return runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.parametrize("name", ["plain_jax.py", "flax_nnx.py"])
def test_the_loss_falls(name, capsys):
    losses = run(name)["losses"]
    assert len(losses) == 30
    assert losses[-1] < losses[0] / 2
    printed = capsys.readouterr().out.splitlines()
    found = [float(line.split()[-1]) for line in (printed[0], printed[-1])]
    assert found == [pytest.approx(loss, abs=1e-3) for loss in (losses[0], losses[-1])]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::SyntaxWarning")  # qwix's and haliax's
@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_each_example_trains_for_a_few_steps(path):
    for library in ("qwix", "haliax"):
        if path.stem.startswith(library):
            pytest.importorskip(f"mxjax.integrations.{library}")
    losses = runpy.run_path(str(path))["main"](3)
    assert losses[0] > losses[1] > losses[2] > 0


@pytest.mark.exhaustive
def test_the_table_has_numbers(capsys):
    """FP8 is more exact than MXFP4; the rotation helps Wgrad."""
    table = run("own_policy.py")["table"]
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["policy", "fprop", "dgrad", "wgrad"]
    assert [row.split()[0] for row in rows] == list(table)
    for row in rows:
        numbers = [float(number) for number in row.split()[1:]]
        assert numbers == pytest.approx(table[row.split()[0]], abs=0.06)
        assert all(5 < number < 50 for number in numbers)
    assert table["fp8"][2] > table["wgrad_hadamard"][2] > table["wgrad"][2]


@pytest.mark.slow
def test_a_model_is_transformed(capsys):
    losses = run("transform.py")["losses"]
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "7 products in a policy, 2 left alone"
    assert losses[-1] < losses[0] / 100
    assert float(printed[-1].split()[-1]) == pytest.approx(losses[-1], abs=1e-3)


@pytest.mark.exhaustive
def test_the_speedrun_leaves_a_report_and_an_export_within_three_minutes_of_processor_time(tmp_path):
    pytest.importorskip("tokenizers")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        ["bash", str(EXAMPLES / "speedrun.sh"), "--tiny", str(tmp_path / "out")],
        env=os.environ | {"PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 180
    found = float(done.stdout.partition("final eval loss ")[2].split()[0])
    assert found == pytest.approx(5.4, abs=0.2)  # as the head of the script says
    report = (tmp_path / "out" / "report.html").read_text()
    assert f"<b>{found:.4f}</b>" in report
    assert "<strong>def </strong>" in report
    assert (tmp_path / "out" / "export" / "tokenizer.json").exists()


def test_every_example_is_short_and_gives_its_command():
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) < 80
        assert f"python examples/{path.name}" in text
