"""What a run says: metrics, terminal, reports, sinks. It is given values and never imports `training.run`."""
