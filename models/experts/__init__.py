"""Experts in place of an MLP: the layer, its devices, the order of its rows, packed traffic."""
