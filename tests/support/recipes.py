"""Which recipes are variants of others."""

VARIANTS = frozenset(
    {
        "nvfp4_te",
        "nvfp4_unclipped",
        "four_over_six_mae",
        "ue5m3_no_tensor_scale",
        "lumen_dequantized",
        "ms_fp4_clip",
        "uniform4_fp32",
    }
)
"""Recipes that differ little from another, which the shorter runs of tests take instead."""
