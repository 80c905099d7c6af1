"""Tokenization of text into Megatron indexed datasets."""
