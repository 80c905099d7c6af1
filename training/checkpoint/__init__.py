"""Checkpoints of a run: saving, restoring, checksums, and recovery from damage."""
