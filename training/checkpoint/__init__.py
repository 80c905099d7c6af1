"""Checkpoints of a run: writing, reading, and finding what is damaged."""
