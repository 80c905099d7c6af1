"""The records of a run: metrics.jsonl, the terminal, traces, MLPerf's log, and evidence of bad steps."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from models.configs import to_dict
from training.display import Display
from training.largest_values import layer_names
from training.metrics import FILE as METRICS
from training.metrics import MetricsLog, Sink
from training.mlperf_log import FILE as MLLOG
from training.mlperf_log import MLPerfLog
from training.nonfinite import NonFiniteGuard
from training.optimizer import learning_rate
from training.processes import is_first_process, together
from training.profiling import StepTracer
from training.progress import is_done
from training.run_config import to_json
from training.setup import Run, mlperf_settings
from training.spikes import SpikeDetector
from training.step import TrainState
from training.step_reporter import StepReporter
from training.tensorboard import EventFiles
from training.wandb_run import WandbRun


class Records(NamedTuple):
    """Everything that a run writes to; `open_records` closes it."""

    log: MetricsLog
    display: Display
    tracer: StepTracer
    mlperf_log: MLPerfLog
    nonfinite: NonFiniteGuard
    reporter: StepReporter


@contextlib.contextmanager
def open_records(run: Run, state: TrainState, began: float, check_place: Callable[[], None]):
    """Yields the records, continued after the state's step, and closes them; the first process alone writes.

    Args:
      run: the run.
      state: the state to continue from.
      began: the time, in seconds since 1970, at which the program started.
      check_place: raises an error if the folder is no longer this run's; called before each line.
    """
    config, start, writes = run.config, int(state.step), is_first_process()
    path = run.folder / METRICS
    with contextlib.ExitStack() as stack:
        with together():  # the others read metrics.jsonl, so the first trims it before
            log = MetricsLog(None)
            if writes:
                log = MetricsLog(path, start, _sinks(run, start), check_place)
            stack.enter_context(log)
        display = stack.enter_context(Display(config.steps, start, config.log_every, quiet=not writes))
        tracer = stack.enter_context(StepTracer(config.observe.profiled_steps, run.folder / "profile"))
        with together():
            wanted = config.mlperf.mllog and writes and not is_done(config, run.folder, start)
            mlperf_path = run.folder / MLLOG if wanted else None
            sequences = start * config.data.batch_size
            mlperf_log = stack.enter_context(MLPerfLog(mlperf_path, mlperf_settings(run), sequences, began))
            show, factor, skips = display.line, config.spike_factor, config.on_nonfinite == "skip"
            spikes = stack.enter_context(SpikeDetector(run.folder, factor, run.batch_of, show, start))
            names = layer_names(state.params)
            nonfinite = NonFiniteGuard(run.folder, skips, run.batch_of, names, show)
        data = config.data
        reporter = StepReporter(
            log,
            display,
            nonfinite,
            spikes,
            data.tokens_a_step,
            data.tokens_a_step * run.model.flops_per_token(data.seq_len),
            learning_rate(config.optimizer, config.steps, np),  # on the host: it must not wait for the device
        )
        yield Records(log, display, tracer, mlperf_log, nonfinite, reporter)


def _sinks(run: Run, start: int) -> list[Sink]:
    """Returns where metrics go besides metrics.jsonl.

    W&B, which fails with a warning only, comes last: an error of the others leaves nothing open.
    """
    observe, sinks = run.config.observe, list[Sink]()
    if observe.tensorboard:
        sinks.append(EventFiles(run.folder, start))
    if observe.wandb:
        values = {"config": to_json(run.config), "model": to_dict(run.model), "data": run.corpus.facts}
        sinks.append(WandbRun(run.folder, values))
    return sinks
