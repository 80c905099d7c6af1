"""Files of lines: whole lines however a write ends, and a damaged file is set aside whole."""

import pytest
from support.runs import file_sizes

from training.log.metrics import LineFile, evaluations, parse_record, read_lines, set_aside_if_damaged
from training.log.mlperf import parse_event

GOOD = [b'{"step": 1, "loss": 2.5}', b'{"step": 1, "eval_loss": "nan"}', b'{"step": 2, "loss": "inf"}']
DAMAGED = [
    *(b"", b"\x00\xff", b"null", b"[1]", b"{}", b'{"step": true}', b'{"step": "1"}', b'{"step": "1_0"}'),
    *(b'{"step": 0}', b'{"step": -5, "loss": 2.5}', b'{"step": 9223372036854775808}'),
    *(b'{"step": 1, "loss": "1_0"}', b'{"step": 1, "loss": " 2.5"}', b'{"step": 1, "eval_loss": [1]}'),
    *(b'{"step": 1, "loss": null}', b'{"step": 1, "loss": "low"}'),
    *(b'{"step": 1, "loss": 1' + b"0" * 400 + b"}", b'{"step": 1' + b"0" * 5000 + b"}"),
    *(b'{"step": 1, "skipped": "yes"}', b'{"step": 1, "grad_norm": "high"}'),
    b'{"step": 1, "eval_loss": 2.5, "eval_sets": {"a": {}}}',
    b'{"step": 1, "eval_loss": 2.5, "eval_sets": [1]}',
    b'{"step": 1, "layers": {"blocks.0.up": {"fprop": {"sqnr_db": "high"}}}}',
    *(b'{"step": 1, "layers": {"blocks.0.up": 1}}', b'{"step": 1} {"step": 2}', b'{"step": 1, "loss": 2.'),
    b"[" * 100_000,
    *(b'\xef\xbb\xbf{"step": 1}', '{"step": 1}'.encode("utf-16-le"), b'{"step": "\xed\xa0\x80"}'),
]


def test_a_line_for_which_there_is_no_room_leaves_no_half(tmp_path):
    file = LineFile(path := tmp_path / "lines", [b"first"])
    with file_sizes(100):
        for i in range(3):
            file.write(f"line {i} " + "x" * 20)
        with pytest.raises(OSError, match="File too large"):
            file.write("line 3 " + "x" * 20)
    assert path.read_bytes().split(b"\n")[-2:] == [b"line 2 " + b"x" * 20, b""]
    file.write("later")
    file.sync()
    file.close()
    assert path.read_bytes().endswith(b"x\nlater\n")


@pytest.mark.parametrize("bad", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_line_is_named_and_the_whole_file_is_set_aside(tmp_path, bad):
    path, whole = tmp_path / "metrics.jsonl", b"\n".join([GOOD[0], bad, *GOOD[1:]]) + b'\n{"step'
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=r"metrics.jsonl is damaged \(line 2: .*; to set it aside: python"):
        evaluations(tmp_path)
    [message] = set_aside_if_damaged(path, parse_record)
    assert f"{path} is damaged (line 2: " in message
    assert message.endswith("renamed it damaged-metrics.jsonl")
    assert (tmp_path / "damaged-metrics.jsonl").read_bytes() == whole
    assert read_lines(path, parse_record) == []
    path.write_bytes(b"x\n")
    assert "damaged-metrics.jsonl-2" in set_aside_if_damaged(path, parse_record)[0]


def test_half_a_last_line_is_no_damage(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join(GOOD) + b'\n{"step')
    assert set_aside_if_damaged(path, parse_record) == []
    assert [line for line, _ in read_lines(path, parse_record)] == GOOD
    assert set_aside_if_damaged(tmp_path / "none", parse_record) == []


EVENT = b':::MLLOG {"key": "block_start", "metadata": {"samples_count": 2}}'


@pytest.mark.parametrize(
    "bad", [b'{"key": "a", "metadata": {}}', b":::MLLOG 1", EVENT[:-9], EVENT.replace(b"2", b'"2"')]
)
def test_a_damaged_event_of_mlperfs_log_is_found(bad):
    assert parse_event(EVENT)["key"] == "block_start"
    with pytest.raises(ValueError, match=r"it is no|an event needs|samples_count"):
        parse_event(bad)
