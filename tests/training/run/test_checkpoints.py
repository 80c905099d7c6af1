"""Checkpoints: what is saved comes back bit for bit, old ones go, and what is missing is said."""

import shutil

import jax
import numpy as np
import pytest
from support.runs import at_step, file_sizes

from training import files as integrity
from training.run import checksums
from training.run.checkpoints import Checkpoints, save_params
from training.run.checksums import set_aside_damaged


def save(folder, state, *steps, **options):
    with Checkpoints(folder, **options) as checkpoints:
        for step in steps:
            checkpoints.save(at_step(state, step), {"next_index": step})


def flip(path, at=None):
    """Flips one bit of a file's byte, by default the middle one."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 4
    path.write_bytes(content)


def test_the_state_and_the_position_come_back_and_parameters_alone(tmp_path, state):
    save(tmp_path, state, 5)
    with Checkpoints(tmp_path) as checkpoints:
        restored, position = checkpoints.restore(jax.eval_shape(lambda: state))
        params = checkpoints.restore_params(jax.eval_shape(lambda: state.params))
    assert position == {"next_index": 5}
    jax.tree.map(np.testing.assert_array_equal, (restored, params), (at_step(state, 5), state.params))


def test_only_the_newest_are_kept(tmp_path, state):
    save(tmp_path, state, 1, 2, 3, keep=2)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest == 3
        with pytest.raises(ValueError, match=r"no checkpoint of step 1 in .*; there are \[2, 3\]"):
            checkpoints.restore_params(state.params, 1)


def test_nothing_to_restore_is_an_error(tmp_path, state):
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match="no checkpoint in"):
            checkpoints.restore(state)
        with pytest.raises(ValueError, match="there are none"):
            checkpoints.restore_params(state.params)


def test_a_checkpoint_of_another_model_is_said_to_be_one(tmp_path, state):
    save(tmp_path, state, 1)
    name, *_ = state.params
    longer = jax.tree.map(lambda x: np.zeros((*x.shape, 1)), state.params[name])
    fewer = {key: value for key, value in state.params.items() if key != name}
    with Checkpoints(tmp_path) as checkpoints:
        for params, found in ((state.params | {name: longer}, "and \\("), (fewer, "and none")):
            with pytest.raises(ValueError, match=f"{name}.* has shape .* {found}"):
                checkpoints.restore(state._replace(params=params))
            with pytest.raises(ValueError, match="belongs to another model"):
                checkpoints.restore_params(params)


def test_the_best_is_kept_beside_the_newest(tmp_path, state):
    losses = {1: 3.0, 2: 1.0, 3: 2.0}
    with Checkpoints(tmp_path, keep=2, losses=losses) as checkpoints:
        for step in (1, 2, 3, 4, 5):
            checkpoints.save(at_step(state, step), {})
        assert checkpoints.best == 2
        checkpoints.losses[5] = 0.5
        checkpoints.save(at_step(state, 6), {})
        assert checkpoints.best == 5
    with Checkpoints(tmp_path, losses=losses) as checkpoints:
        assert checkpoints.best is None
        with pytest.raises(ValueError, match=r"there are \[5, 6\]"):
            checkpoints.restore_params(state.params, 2)


def test_damage_to_any_file_is_found(tmp_path, state):
    save(tmp_path, state, 1)
    folder = tmp_path / "1"
    assert checksums.problems(folder) == {}
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    parts = {path.relative_to(folder).parts[0] for path in files}
    assert parts >= {"params", "rest", "data", "_CHECKPOINT_METADATA", "checksums.json"}
    for path in files:
        if path == folder / "commit_success.txt":  # says in words what the folder's name says
            continue
        content = path.read_bytes()
        flip(path)
        for damaged in (path.read_bytes(), content[:-1], b""):
            path.write_bytes(damaged)
            assert checksums.problems(folder), path
        path.unlink()
        assert list(checksums.problems(folder).values()) == [integrity.MISSING], path
        path.write_bytes(content)
    assert checksums.problems(folder) == {}


@pytest.mark.parametrize("crafted", [{}, [1], {"a": 1}, {"a": [1]}, {"a": ["1", "2"]}, None], ids=str)
def test_a_record_of_another_kind_with_its_right_checksum_is_damage(tmp_path, crafted):
    content = {"metadata": {}} if crafted is None else {"metadata": {}, "files": crafted}
    (tmp_path / "checksums.json").write_text(integrity.to_checked(content))
    (tmp_path / "_CHECKPOINT_METADATA").write_text("[" * 100_000)
    name = "_CHECKPOINT_METADATA" if crafted == {} else "checksums.json"
    assert checksums.problems(tmp_path) == {name: "is damaged"}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("params/_METADATA", "[" * 100_000, r"cannot be read \(RecursionError: "),
        ("rest/_METADATA", "{}", r"cannot be read \(KeyError: "),
        ("data/metadata", '{"next_index": "x"}', "holds no position in the data after step 1"),
    ],
)
def test_a_crafted_checkpoint_is_one_line(tmp_path, state, name, content, said):
    save(tmp_path, state, 1)
    (tmp_path / "1" / name).write_text(content)
    checksums.write(tmp_path / "1", 1)
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match=said):
        checkpoints.restore(state)


def test_checksums_of_parts_are_taken_over_unless_the_file_has_changed_since(tmp_path, state, monkeypatch):
    save(tmp_path, state, 1)
    expected = (tmp_path / "1" / "checksums.json").read_bytes()
    own = "params/ocdbt.process_0"
    [name, *_] = [path.name for path in (tmp_path / "1" / own / "d").iterdir()]
    summed, original = [], checksums.crc32_of
    monkeypatch.setattr(checksums, "crc32_of", lambda path: summed.append(path) or original(path))
    checksums.write_part(tmp_path / "1", 0)
    assert tmp_path / "1" / own / "d" / name in summed
    (tmp_path / "1" / own / "manifest.ocdbt").write_bytes(b"longer" * 1000)
    summed.clear()
    checksums.write(tmp_path / "1", 1)
    assert {path.parent.name for path in summed if "ocdbt.process_0" in path.parts} == {"ocdbt.process_0"}
    assert not list(tmp_path.glob("1/checksums-*"))
    assert checksums.problems(tmp_path / "1") == {}
    assert (tmp_path / "1" / "checksums.json").read_bytes() != expected


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_used(tmp_path, state):
    save(tmp_path, state, 1, 2, 3)
    flip(max((tmp_path / "3" / "params").rglob("d/*"), key=lambda path: path.stat().st_size))
    flip(tmp_path / "1" / "rest" / "_METADATA")
    said = "\n".join(set_aside_damaged(tmp_path))
    assert "3 is damaged" in said
    assert "renamed it damaged-3" in said
    assert "continuing from the checkpoint of step 2" in said
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.restore(state)[1] == {"next_index": 2}
        checkpoints.save(at_step(state, 3), {"next_index": 3})
    assert set_aside_damaged(tmp_path) == []
    assert {path.name for path in tmp_path.iterdir()} == {"2", "3", "damaged-1", "damaged-3"}
    flip(tmp_path / "3" / "data" / "metadata")
    assert "renamed it damaged-3-2" in "".join(set_aside_damaged(tmp_path))


def test_what_an_interrupted_removal_left_is_removed(tmp_path, state):
    save(tmp_path, state, 1, 2)
    shutil.rmtree(tmp_path / "1" / "params")
    assert "removed the rest" in "".join(set_aside_damaged(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["2"]


def test_without_a_good_checkpoint_nothing_is_touched(tmp_path, state):
    save(tmp_path, state, 1, 2)
    for step in (1, 2):
        (tmp_path / str(step) / "checksums.json").unlink()
    for _ in range(2):
        said = r"no good checkpoint remains.*2 is damaged \(checksums.json is miss"
        with pytest.raises(ValueError, match=said):
            set_aside_damaged(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2"}


def test_weights_are_read_where_moments_alone_are_damaged(tmp_path, state):
    save(tmp_path, state, 1)
    flip(max((tmp_path / "1" / "rest").rglob("d/*"), key=lambda path: path.stat().st_size))
    with Checkpoints(tmp_path) as checkpoints:
        found = checkpoints.restore_params(state.params)
        for read in (
            lambda: checkpoints.restore(state, 1),
            lambda: checkpoints.restore_params(state.params, weights="ema"),
        ):
            with pytest.raises(ValueError, match=r"1 is damaged \(rest/"):
                read()
    jax.tree.map(np.testing.assert_array_equal, found, state.params)


def test_reading_a_damaged_checkpoint_names_the_others(tmp_path, state):
    save(tmp_path, state, 1, 2)
    flip(tmp_path / "2" / "params" / "_METADATA")
    with Checkpoints(tmp_path) as checkpoints:
        said = r"2 is damaged \(params/_METADATA is damaged\); others are \[1\]"
        with pytest.raises(ValueError, match=said):
            checkpoints.restore_params(state.params)
        checkpoints.restore_params(state.params, 1)


def test_parameters_saved_alone_are_whole(tmp_path, state):
    save_params(tmp_path, state.params)
    assert set_aside_damaged(tmp_path) == []
    with Checkpoints(tmp_path) as checkpoints:
        restored, position = checkpoints.restore(state)
    assert position is None
    jax.tree.map(np.testing.assert_array_equal, restored.params, state.params)


def test_parameters_that_do_not_fit_on_the_disk_are_an_oserror(tmp_path, caplog):
    with file_sizes(4000), pytest.raises(OSError, match="File too large"):
        save_params(tmp_path, {"w": jax.random.normal(jax.random.key(0), (8192,))})
    assert caplog.records == []


def test_a_state_of_another_step_is_not_restored(tmp_path, state):
    """As in a checkpoint whose checksums.json does not record the step."""
    save(tmp_path, state, 1)
    (tmp_path / "1").rename(tmp_path / "2")
    said = "2 holds the state of step 1; rename or remove it"
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match=said):
        checkpoints.restore(state)


@pytest.mark.parametrize("name", ["a[1]", "a*", "what?", "]", r"a\b"])
def test_a_path_that_is_a_pattern_is_refused(tmp_path, state, name):
    for save_there in (lambda folder: save_params(folder, state.params), lambda f: Checkpoints(f, keep=1)):
        with pytest.raises(ValueError, match=r"cannot be saved in .*: name a path without [][*?\\]"):
            save_there(tmp_path / name / "checkpoints")
    assert list(tmp_path.iterdir()) == []
