"""A run's folder: its lock, configuration, checkpoints and records."""
