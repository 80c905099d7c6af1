"""Hugging Face checkpoints, converted to and from the parameters of `models.decoder`."""
