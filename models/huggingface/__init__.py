"""Checkpoints of Hugging Face's Llamas, and the parameters of `models.llama` in them."""
