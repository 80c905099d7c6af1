"""Attention of the decoder: causal, by parts, around a ring of devices, within documents."""
