"""Processes that were started differently: refused before the first step, with what differs."""

import pytest
from support.marks import parametrize
from support.runs import ROOT, start_pair

from training.run.setup import check_same

SMALL = "--distributed --batch-size 2 --seq-len 16 --eval-batches 1 --warmup-steps 1 --steps 3 --policy bf16"
TRAIN = (ROOT / "train.py", *SMALL.split())


def test_the_process_and_the_difference_are_named():
    first = {"--lr": 0.1, "--steps": 3, "jax": "0.11.1"}
    check_same([first, dict(first)])
    with pytest.raises(ValueError, match=r"process 1 differs from process 0: --lr is 0\.2 and not 0\.1;"):
        check_same([first, first | {"--lr": 0.2}, first])
    with pytest.raises(ValueError, match=r"processes 1, 3 differ .*: jax is 0\.11\.2 and not 0\.11\.1;"):
        check_same([first, first | {"jax": "0.11.2"}, first, first | {"jax": "0.11.3"}])


def test_a_long_list_of_differences_is_cut():
    with pytest.raises(ValueError, match=r"--f4 is 1 and not 0, and 3 more; start") as caught:
        check_same([{f"--f{i}": value for i in range(8)} for value in (0, 1)])
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_processes_with_other_flags_and_data_do_not_train(tmp_path):
    """The data of one node is out of date, under the same name and with the same size."""
    a, b, run = tmp_path / "a", tmp_path / "b", tmp_path / "run"
    for folder, what in ((a, "square"), (b, "cube")):
        folder.mkdir()
        (folder / "text.txt").write_text(f"line: the {what} of the number\n".rjust(40) * 500)
    flags = [(*TRAIN, "--data", "text.txt", "--out", run, "--lr", rate) for rate in ("1e-3", "2e-3")]
    for process in start_pair(*flags, folders=(a, b)):
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 1, errors
        message = "process 1 differs from process 0: --lr is 0.002 and not 0.001, the data's crc32 is "
        assert f"train.py: error: --distributed: {message}" in errors
        assert "Traceback" not in errors
    assert not run.exists()


@parametrize("bad", slow=[1], exhaustive=[0])
def test_wrong_flags_of_one_process_end_both(tmp_path, bad):
    of_each = [(*TRAIN, "--out", tmp_path / "run")] * 2
    of_each[bad] = (*of_each[bad], "--lrx", "1")
    runs = start_pair(*of_each)
    errors = [run.communicate(timeout=300)[1] for run in runs]
    said = "Unrecognized options: --lrx, 1; did you mean --lr?; see train.py --help\n"
    assert errors[bad] == f"train.py: error: {said}"
    assert errors[1 - bad] == f"train.py: error: process {bad}: {said}"
    assert (runs[bad].returncode, runs[1 - bad].returncode) == (2, 1)
    assert not (tmp_path / "run").exists()
