"""Files of lines: whole lines however a write ends, and damaged lines are named, copied and taken out."""

import itertools
import json
import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.log import metrics
from training.log import mlperf as mlperf_log
from training.log.metrics import (
    LineFile,
    evaluations,
    in_ranges,
    longest_ascending,
    missing_steps,
    parse_record,
    read_lines,
    series_of,
    set_aside_damaged_lines,
    set_aside_damaged_records,
)

GOOD = [b'{"step": 1, "loss": 2.5}', b'{"step": 1, "eval_loss": "nan"}', b'{"step": 2, "loss": "inf"}']
DAMAGED = [
    b"",
    b"\x00\xff",
    b"null",
    b"[1]",
    b"{}",
    b'{"step": true}',
    b'{"step": "1"}',
    b'{"step": "1_0"}',
    b'{"step": 0}',
    b'{"step": -5, "loss": 2.5}',
    b'{"step": 9223372036854775808}',
    b'{"step": 1, "loss": "1_0"}',
    b'{"step": 1, "loss": " 2.5"}',
    b'{"step": 1, "eval_loss": [1]}',
    b'{"step": 1, "loss": null}',
    b'{"step": 1, "loss": "low"}',
    b'{"step": 1, "loss": 1' + b"0" * 400 + b"}",
    b'{"step": 1' + b"0" * 5000 + b"}",
    b'{"step": 1, "skipped": "yes"}',
    b'{"step": 1} {"step": 2}',
    b'{"step": 1, "loss": 2.',
    b"[" * 100_000,
]


def test_a_line_for_which_there_is_no_room_leaves_no_half(tmp_path):
    before, path = resource.getrlimit(resource.RLIMIT_FSIZE), tmp_path / "lines"
    file = LineFile(path, [b"first"])
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        for i in range(3):
            file.write(f"line {i} " + "x" * 20)
        with pytest.raises(OSError, match="File too large"):
            file.write("line 3 " + "x" * 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes().split(b"\n")[-2:] == [b"line 2 " + b"x" * 20, b""]
    file.write("later")
    file.sync()
    file.close()
    assert path.read_bytes().endswith(b"x\nlater\n")


def test_damaged_lines_are_named_and_the_rest_is_kept(tmp_path):
    path, whole = tmp_path / "metrics.jsonl", b"\n".join([GOOD[0], *DAMAGED, *GOOD[1:]]) + b'\n{"step'
    path.write_bytes(whole)
    for _ in range(2):
        with pytest.raises(
            ValueError,
            match=rf"line 2 to {len(DAMAGED) + 1} of .*metrics.jsonl cannot be used \(line 2: it is no",
        ):
            evaluations(tmp_path)
    [message] = set_aside_damaged_records(tmp_path)
    assert f"the other 3 stay, and {tmp_path.name}" not in message
    assert "damaged-metrics.jsonl is the file as it was" in message
    assert (tmp_path / "damaged-metrics.jsonl").read_bytes() == whole
    assert [line for line, _ in read_lines(path, parse_record, series_of)] == GOOD
    assert set_aside_damaged_records(tmp_path) == []
    path.write_bytes(b"x\n")
    assert "damaged-metrics.jsonl-2" in set_aside_damaged_records(tmp_path)[0]


def records(*lines):
    """Lines of metrics.jsonl, given as (step, kind)."""
    values = {"policy": "bf16", "layers": {}, "loss": 1.0, "eval_loss": 1.0}
    return b"".join(json.dumps({"step": step, kind: values[kind]}).encode() + b"\n" for step, kind in lines)


@pytest.mark.parametrize(
    ("added", "at", "named"),
    [
        ([(2, "loss")], 4, "line 5 .*line 5: it is there twice"),
        ([(2, "eval_loss")], 4, "line 5 .*line 5: it is there twice"),
        ([(1, "loss")], 6, "line 7 .*line 7: it is there twice"),
        ([(900, "loss")], 1, "line 2 .*line 2: it is out of order"),
        ([(900, "loss"), (901, "loss")], 0, "line 1 to 2 .*line 1: it is out of order"),
        ([(1, "eval_loss")], 8, "line 9 .*line 9: it is out of order"),
        ([(1, "loss"), (2, "loss"), (3, "loss")], 8, "line 9 to 11 .*line 9: it is there twice"),
    ],
)
def test_lines_that_are_there_twice_or_out_of_order_are_taken_out(tmp_path, added, at, named):
    good = [(1, "loss"), (2, "layers"), (2, "loss"), (2, "eval_loss"), (3, "policy")]
    good += [(3, "loss"), (4, "loss"), (4, "eval_loss")]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(records(*good))
    assert set_aside_damaged_records(tmp_path) == []
    path.write_bytes(records(*good[:at], *added, *good[at:]))
    with pytest.raises(ValueError, match=named):
        evaluations(tmp_path)
    [message] = set_aside_damaged_records(tmp_path)
    assert "the other 8 stay" in message
    assert path.read_bytes() == records(*good)


@given(st.lists(st.integers(0, 6), max_size=8))
def test_the_longest_ascending_sequence_is_the_longest(keys):
    found = [keys[i] for i in longest_ascending(dict(enumerate(keys)))]
    assert all(a < b for a, b in itertools.pairwise(found))
    choices = itertools.chain.from_iterable(itertools.combinations(keys, n) for n in range(len(keys) + 1))
    ascending = (c for c in choices if all(a < b for a, b in itertools.pairwise(c)))
    assert len(found) == max(map(len, ascending))


def test_damaged_events_of_mlperfs_log_are_taken_out(tmp_path):
    event = b':::MLLOG {"key": "block_start", "metadata": {"samples_count": 2}}'
    bad = [b'{"key": "a", "metadata": {}}', b":::MLLOG 1", event[:-9], event.replace(b"2", b'"2"')]
    (tmp_path / mlperf_log.FILE).write_bytes(b"\n".join([event, *bad, event, b""]))
    assert "line 2 to 5 of" in mlperf_log.set_aside_damaged_events(tmp_path)[0]
    assert (tmp_path / mlperf_log.FILE).read_bytes() == event + b"\n" + event + b"\n"
    assert set_aside_damaged_lines(tmp_path / "none", json.loads) == []


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_was_removed_or_replaced_is_put_back(tmp_path, capsys, replaced):
    path = tmp_path / "metrics.jsonl"
    file = LineFile(path, [b"first"])
    file.write("second")
    path.unlink()
    if replaced:
        path.write_text("another")
    file.write("third")
    file.write("fourth")
    file.close()
    assert path.read_text() == "first\nsecond\nthird\nfourth\n"
    said = "replaced by another file, which is now replaced-metrics.jsonl" if replaced else "removed"
    assert capsys.readouterr().err.count(f"metrics.jsonl was {said}; it is put back") == 1
    assert not replaced or (tmp_path / "replaced-metrics.jsonl").read_text() == "another"


def test_lines_follow_a_folder_that_is_moved_and_leave_the_next_one_alone(tmp_path, capsys):
    out, other, moved = (tmp_path / name for name in ("out", "other", "moved"))
    out.mkdir()
    other.mkdir()
    file = LineFile(out / "metrics.jsonl", [])
    (other / "metrics.jsonl").write_text("another's")
    out.rename(moved)
    other.rename(out)
    file.write("first")
    file.close()
    assert [path.name for path in out.iterdir()] == ["metrics.jsonl"]
    assert (out / "metrics.jsonl").read_text() == "another's"
    assert (moved / "metrics.jsonl").read_text() == "first\n"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "line", [b'\xef\xbb\xbf{"step": 1}', '{"step": 1}'.encode("utf-16-le"), b'{"step": "\xed\xa0\x80"}']
)
def test_a_line_that_is_not_utf_8_is_damaged(line):
    with pytest.raises(ValueError, match="it is no JSON object"):
        parse_record(line)


def test_missing_steps_are_named(tmp_path):
    assert missing_steps(tmp_path, 0) == []
    assert "lacks step 1 to 2 of the 2 taken" in missing_steps(tmp_path, 2)[0]
    lines = [{"step": step, "loss": 1.0} for step in (1, 2, 5, 6, 8)] + [{"step": 3, "eval_loss": 1.0}]
    (tmp_path / metrics.FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "lacks step 3 to 4, 7, 9 of the 9 taken" in missing_steps(tmp_path, 9)[0]
    assert missing_steps(tmp_path, 2) == []


def test_ranges_are_cut_short():
    assert in_ranges([]) == ""
    assert in_ranges([1, 2, 3, 5]) == "1 to 3, 5"
    assert in_ranges(range(1, 20, 2)) == "1, 3, 5, 7, 9 and 5 more"
