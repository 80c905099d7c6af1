"""Batches of tokens: from text, or from Megatron datasets in megatron-core's order."""
