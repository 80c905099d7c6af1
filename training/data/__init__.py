"""Batches of tokens: from text, and from Megatron datasets in the order of megatron-core."""
