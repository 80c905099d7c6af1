"""The command line of train.py: flags over the defaults of a preset, or over a run that goes on."""

import argparse
import contextlib
import dataclasses
import math
import pathlib
import sys
import types
from collections.abc import Callable, Mapping

import tyro

from training import mlperf
from training.config import Config, DataConfig, MLPerfConfig, OptimizerConfig
from training.run_config import from_json, read_description


def mlperf_llama31_8b(batch_size: int = 32) -> Config:
    """Returns MLPerf Training's llama31_8b at a batch size, but for the data, which --data names.

    The learning rate and the warm-up are those of the reference's runs at that batch size, or at 32 where
    there are none. A run ends at the target, long before the last step of its schedule.
    """
    reference = mlperf.REFERENCES.get(batch_size, mlperf.REFERENCES[32])
    eval_every = math.ceil(mlperf.EVAL_EVERY / batch_size)
    return Config(
        preset="mlperf-llama3.1-8b",
        model="llama3.1-8b",
        data=DataConfig(vocab_size=mlperf.VOCAB_SIZE, batch_size=batch_size, seq_len=mlperf.SEQ_LEN),
        optimizer=OptimizerConfig(
            lr=reference.lr, warmup_steps=round(reference.warmup_sequences / batch_size)
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
"""By name, functions of the batch size."""


def parse(argv: list[str] | None = None) -> Config:
    """Returns the configuration that the command line asks for; exits with help or an error, as tyro does.

    A preset is made for the batch size first, or the run to continue is read; every other flag then replaces
    one of its values.
    """
    argv = sys.argv[1:] if argv is None else argv
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--preset")
    first.add_argument("--batch-size", "--batch_size", type=int, default=32)
    first.add_argument("--resume", action="store_true")
    first.add_argument("--out", type=pathlib.Path)
    default = Config()
    with contextlib.suppress(argparse.ArgumentError):  # what is wrong, tyro will say better
        known, _ = first.parse_known_args(argv)
        begun = _begun(known.out) if known.resume and known.out else None
        if begun is not None:
            # Which devices there were says nothing of those there are.
            default = dataclasses.replace(begun, stop_after=None, mesh=None, distributed=False)
        elif known.preset in PRESETS and known.batch_size > 0:
            default = PRESETS[known.preset](known.batch_size)
    return tyro.cli(Config, args=argv, default=default, description="Train a Llama in MXFP4.")


def _begun(folder: pathlib.Path) -> Config | None:
    """Returns the configuration of the run in a folder; None if there is none, or an import not begun."""
    description = read_description(folder) if (folder / "config.json").exists() else {}
    return from_json(description["config"]) if "data" in description else None
