"""The command line of train.py: flags that replace the defaults, a preset, or the values of a resumed run."""

import argparse
import contextlib
import dataclasses
import math
import pathlib
import sys
import types
from collections.abc import Callable, Mapping

from training import mlperf
from training.config import Config, DataConfig, MLPerfConfig, OptimizerConfig
from training.flags import check_lists, flags_of


def mlperf_llama31_8b(batch_size: int = 32) -> Config:
    """Returns MLPerf Training's llama31_8b at a batch size; only --data is missing.

    Learning rate and warm-up come from the published runs at that batch size, or else at 32. A run ends at
    the target, long before the last step of its schedule.
    """
    published = mlperf.PUBLISHED_RUNS.get(batch_size, mlperf.PUBLISHED_RUNS[32])
    eval_every = math.ceil(mlperf.EVAL_EVERY / batch_size)
    return Config(
        preset="mlperf-llama3.1-8b",
        model="llama3.1-8b",
        data=DataConfig(vocab_size=mlperf.VOCAB_SIZE, batch_size=batch_size, seq_len=mlperf.SEQ_LEN),
        optimizer=OptimizerConfig(
            lr=published.lr, warmup_steps=round(published.warmup_sequences / batch_size)
        ),
        mlperf=MLPerfConfig(mllog=True),
        remat="full",
        steps=mlperf.MAX_STEPS,
        checkpoint_every=eval_every,
        eval_every=eval_every,
        eval_sequences=mlperf.EVAL_SEQUENCES,
        target_loss=mlperf.TARGET_LOSS,
    )


PRESETS: Mapping[str, Callable[[int], Config]] = types.MappingProxyType(
    {"mlperf-llama3.1-8b": mlperf_llama31_8b}
)
"""Presets by name, as functions of the batch size."""


def parse(argv: list[str] | None = None) -> Config:
    """Returns the configuration on the command line; exits with help or an error, as tyro does.

    A preset is built for the batch size first, or the run to resume is read. Every other flag then replaces
    one of its values.
    """
    argv = sys.argv[1:] if argv is None else argv
    check_lists(argv)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--preset")
    first.add_argument("--batch-size", "--batch_size", type=int, default=32)
    first.add_argument("--resume", action="store_true")
    first.add_argument("--out", type=pathlib.Path)
    default = Config()
    with contextlib.suppress(argparse.ArgumentError):  # tyro reports errors better
        known, _ = first.parse_known_args(argv)
        if known.resume and known.out and (begun := _begun_run(known.out)) is not None:
            # The devices may be others than those at the beginning.
            default = dataclasses.replace(begun, stop_after=None, mesh=None, distributed=False)
            if any(word.partition("=")[0] == "--set" for word in argv):  # or tyro appends to the run's
                default = dataclasses.replace(default, precision=dataclasses.replace(begun.precision, set=()))
        elif known.preset in PRESETS and known.batch_size > 0:
            default = PRESETS[known.preset](known.batch_size)
    return flags_of(Config, argv, default=default, description="Train a Llama in MXFP4.")


def _begun_run(folder: pathlib.Path) -> Config | None:
    from training.resume import begun_run  # here, because it imports much

    return begun_run(folder)


def check_flags() -> None:
    """Ends the program if its flags are wrong, unless they replace those of a run to resume.

    With --distributed the other processes must be told, which takes the modules that are not imported yet.
    """
    if not {"--resume", "--distributed"} & set(sys.argv):
        parse()
