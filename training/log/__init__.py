"""Output of a run: metrics, terminal, reports, sinks. It is given values and never imports `training.run`."""
