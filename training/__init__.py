"""What a training run needs around the model: configuration, data, optimizer, steps, checkpoints, metrics."""
