"""Resuming a run, in its folder or in a new one: whether a configuration continues it.

`--resume --steps N` extends a run, and `--branch` goes on from one of its checkpoints in another folder. Both
need that the steps taken so far would have been the same: the learning rate, the order of the data and the
switches between policies may depend on a run's length. The data must be what the run began with, in tokens of
the same tokenizer.
"""

import dataclasses
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from training.config import ABOUT_THE_RUN, Config, by_flag
from training.data.megatron import MegatronCorpus, parse_blend
from training.data.text import TextCorpus
from training.optimizer.config import decay_steps
from training.optimizer.schedule import learning_rate
from training.phases import Phase, first_steps
from training.run.checksums import saved_steps
from training.run.record import CONFIG, from_json, read_run_config

_MAY_CHANGE = ABOUT_THE_RUN | {"eval_data", "eval_batches", "eval_sequences", "target_loss"}
_MAY_CHANGE |= {"expert_traffic", "on_nonfinite"}
"""A resumed run may change these and stay the same run. `check_resumable` compares data, which may move."""
_SCHEDULE = ("steps", "schedule", "decay", "decay_shape", "min_lr_ratio")
"""May change too where the learning rates so far do not."""
_ORIGIN = ("init", "branch")  # of the run that a branch leaves
_PLACE: dict[str, Any] = {"mesh": None, "devices": None, "distributed": False, "expert_traffic": None}
"""The devices may be others than those at the beginning."""


class Branch(NamedTuple):
    """The place where a run continues another one: its folder, and the step of its checkpoint."""

    folder: pathlib.Path
    step: int


def branch_point(path: pathlib.Path) -> Branch:
    """Returns the run and the step of --branch RUN, its newest checkpoint, or --branch RUN/checkpoints/STEP.

    Raises:
      ValueError: there is no such checkpoint, or no run that has begun.
    """
    is_step = path.parent.name == "checkpoints" and path.name.isdecimal()
    folder = path.parents[1] if is_step else path
    if begun_run(folder) is None:
        raise ValueError(f"--branch: {folder} holds no run that has begun; name one, or use --init")
    steps = saved_steps(folder / "checkpoints")
    step = int(path.name) if is_step else max(steps, default=0)
    if step not in steps:
        raise ValueError(f"--branch: no such checkpoint in {folder}; there are {sorted(steps) or 'none'}")
    return Branch(folder, step)


def branch_defaults(path: pathlib.Path, decay: int | None, steps: int | None) -> Config:
    """Returns the configuration of the run that --branch names, as that of a new run.

    With --decay it decays over the next steps; with more --steps alone it is extended as by --resume.
    """
    folder, step = branch_point(path)
    begun = begun_run(folder)
    assert begun is not None
    if decay is None:
        begun, changes = _extended(begun, steps, step), {}
    else:
        optimizer = dataclasses.replace(begun.optimizer, schedule="wsd", decay=decay)
        changes = {"optimizer": optimizer, "steps": step + decay}
    observe = dataclasses.replace(begun.observe, profile=None)
    changes |= {"observe": observe, "init": None, "out": None, "resume": False, "stop_after": None}
    return dataclasses.replace(begun, **changes, **_PLACE)


def extension_defaults(folder: pathlib.Path, steps: int | None) -> Config | None:
    """Returns the configuration of the run that --resume names; None unless it has begun."""
    if (begun := begun_run(folder)) is None:
        return None
    extended = _extended(begun, steps, last_checkpoint(folder))
    return dataclasses.replace(extended, stop_after=None, **_PLACE)


def _extended(begun: Config, steps: int | None, taken: int) -> Config:
    """Returns the configuration of a run that is to have so many steps, after those taken.

    If these are more, a cosine that has begun keeps its length; later rates are its lowest.
    """
    if steps is None or steps <= begun.steps or begun.optimizer.schedule != "cosine":
        return begun
    if _changed_rate(dataclasses.replace(begun, steps=steps), begun, taken) is None:
        return begun
    decay = decay_steps(begun.optimizer, begun.steps)
    return dataclasses.replace(begun, optimizer=dataclasses.replace(begun.optimizer, decay=decay))


def begun_run(folder: pathlib.Path) -> Config | None:
    """Returns the configuration of the run in a folder; None without a run, or if it has not begun."""
    return begun_config(read_run_config(folder) if (folder / CONFIG).exists() else {})


def begun_config(saved: Mapping[str, Any]) -> Config | None:
    """Returns the configuration in the values of config.json; None without any, or if no run has begun.

    An imported checkpoint is a run that has not begun: it has no data yet.
    """
    return from_json(saved["config"]) if "data" in saved else None


def check_same_run(config: Config, begun: Config, folder: pathlib.Path, taken: int) -> None:
    """Raises ValueError unless this configuration continues the run in `folder` after `taken` steps."""
    check_resumable(config, begun, folder)
    if _branches(config) and config.steps <= taken:
        raise ValueError(
            f"--branch: {folder} has taken {taken} of --steps {config.steps}; add --decay N or more --steps"
        )
    check_extension(config, begun, taken)


def _branches(config: Config) -> bool:
    return config.branch is not None and not config.resume


def _difference(begun: Any, asked: Any) -> str:
    """Returns how two values differ; a text of a policy leaves out, for example, the seed of its signs."""
    given = [shlex.join(map(str, v)) if isinstance(v, tuple) and v else v for v in (begun, asked)]
    text = repr if str(begun) == str(asked) else str
    said = ["the default" if v in (None, ()) else text(v) for v in given]
    return f"the run has {said[0]}, the command line {said[1]}"


def check_resumable(config: Config, saved: Config, folder: pathlib.Path) -> None:
    """Raises ValueError if `config` differs from the run in `folder`; the message lists the differences.

    More steps are no difference, nor is another schedule, which `check_extension` checks. A branch may have
    fewer steps.
    """
    asked, begun = map(by_flag, (config, saved))
    branches = _branches(config)
    may_change = {*_MAY_CHANGE, *_SCHEDULE[1:], *((*_ORIGIN, "steps") if branches else ())}
    differences = [
        f"--{name.replace('_', '-')}: " + _difference(begun[name], asked[name])
        for name in begun
        if name not in may_change
        and begun[name] != asked[name]
        and not (name == "data" and _same_blend(begun[name], asked[name]))
        and not (name == "branch" and begun[name] and asked[name] in begun[name].parents[1:2])
        and not (name == "steps" and asked[name] > begun[name])
    ]
    if differences:
        what = f"--resume: {folder} holds another run; leave these flags out or choose another --out."
        if branches:
            what = f"--branch goes on with the flags of {folder}; leave these out, or begin a run by --init."
        raise ValueError("\n  ".join([what, *differences]))


def _same_blend(begun: Sequence[str], asked: Sequence[str]) -> bool:
    """Whether as many datasets are named with the same weights."""
    ours, theirs = map(parse_blend, (asked, begun))
    return len(ours[0]) == len(theirs[0]) and ours[1] == theirs[1]


def last_checkpoint(folder: pathlib.Path) -> int:
    """Returns the step of the newest checkpoint of the run in a folder; 0 if there is none."""
    return max(saved_steps(folder / "checkpoints"), default=0)


def check_extension(config: Config, saved: Config, taken: int) -> None:
    """Checks that a run may go on with another length or schedule, as far as flags decide it.

    Raises:
      ValueError: it may not; the message says why.
    """
    asked, begun = map(by_flag, (config, saved))
    changed = [name for name in _SCHEDULE if asked[name] != begun[name]]
    if not changed:
        return
    flag = f"--{changed[0].replace('_', '-')}"
    why = f"{flag} {asked[changed[0]]}: the run has {flag} {begun[changed[0]]}"
    if config.mlperf.mllog:
        raise ValueError(f"{why}, which its MLPerf log names; begin a new run")
    if (found := _changed_rate(config, saved, taken)) is not None:
        step, ours, theirs = found
        way = "a step by --branch RUN/checkpoints/STEP --decay N, begin a run with --init, or use "
        way += "--schedule wsd or constant from the start"
        if saved.optimizer.schedule == "wsd":
            last = saved.steps - decay_steps(saved.optimizer, saved.steps)
            way = f"step {last}, where its decay begins, or an earlier one by --branch RUN/checkpoints/STEP "
            way += "--steps N, or begin a run with --init"
        raise ValueError(
            f"{why}, on which its learning rate depends: at step {step + 1} it was {theirs:.9g} and "
            f"would have been {ours:.9g}; go on from {way}"
        )


def _changed_rate(config: Config, saved: Config, taken: int) -> tuple[int, float, float] | None:
    """Returns the first of `taken` steps, counted from 0, with another learning rate, and both rates."""
    rates = [learning_rate(c.optimizer, c.steps, np)(np.arange(taken)) for c in (config, saved)]
    ours, theirs = map(np.asarray, rates)
    different = np.flatnonzero(ours != theirs)
    step = int(different[0]) if different.size else 0
    return (step, float(ours[step]), float(theirs[step])) if different.size else None


def check_order(corpus: TextCorpus | MegatronCorpus, config: Config, saved: Config) -> None:
    """Raises ValueError if a run of `config.steps` would have read the data in another order so far."""
    orders = [corpus.order(c.data, c.seed, c.steps) for c in (config, saved)]
    if orders[0] != orders[1]:
        raise ValueError(
            f"--steps {config.steps}: with --steps {saved.steps} the data is in the order for {orders[1]}, "
            f"and would be in that for {orders[0]}; begin a run with --init"
        )


def extend_phases(phases: Sequence[Phase], config: Config, taken: int) -> tuple[Phase, ...]:
    """Returns the phases of an extended run: those on record, with their first steps in the longer run.

    Raises:
      ValueError: a step that has been taken would be in another phase, or phases would change their order.
    """
    steps = first_steps(config.precision.policy, config.steps)
    moved = tuple(phase._replace(first_step=step) for phase, step in zip(phases, steps, strict=True))
    if any(a >= b for a, b in zip(steps, (*steps[1:], config.steps + 1), strict=True)):
        raise ValueError(
            f"--steps {config.steps}: the policies would begin at steps {', '.join(map(str, steps))}, out of "
            "order or beyond the run; begin a run with --init"
        )
    for old, new in zip(phases, moved, strict=True):
        if old.first_step != new.first_step and min(old.first_step, new.first_step) <= taken:
            raise ValueError(
                f"--steps {config.steps}: {old.policy} would begin at step {new.first_step}, and the run, "
                f"now at step {taken}, has it from step {old.first_step} on; begin a run with --init, or "
                "name steps instead of shares in --policy from the start"
            )
    return moved


def check_same_data(saved: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Raises ValueError if the run of this config.json began with data of other facts, wherever it lies."""
    began_with = saved.get("data", facts)
    if not _same(began_with, facts):
        raise ValueError(
            f"--resume: the data is {_in_words(facts)}, but the run began with {_in_words(began_with)}; put "
            "that data back, or begin a run with --init on the new one"
        )


def changed_data(folder: pathlib.Path, facts: Mapping[str, Any]) -> str | None:
    """Returns a line if the data of the run in `folder` is not what it was trained on, wherever it lies."""
    began_with = read_run_config(folder).get("data", facts)
    if _same(began_with, facts):
        return None
    return (
        f"the data of {folder} is now {_in_words(facts)}, and the run was trained on "
        f"{_in_words(began_with)}. What is evaluated may have been trained on: put that data back, or name "
        "other data with --eval-data"
    )


def _same(began_with: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    return {**began_with, "source": None} == {**facts, "source": None}


def _in_words(facts: Mapping[str, Any]) -> str:
    sizes = f"{facts['train_tokens']:,} + {facts['validation_tokens']:,} tokens"
    return f"{facts['source']} with {sizes}, crc32 {facts['crc32']}"
