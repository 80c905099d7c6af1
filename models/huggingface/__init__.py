"""Hugging Face checkpoints of Llamas, converted to and from the parameters of `models.decoder`."""
