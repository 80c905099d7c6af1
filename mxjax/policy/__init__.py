"""Policies: the precision of each GEMM of a linear layer, as frozen, hashable data."""

from mxjax.policy.policy import (
    OPERANDS,
    Gemm,
    Policy,
    Rotation,
    Signs,
    check_policy,
    map_operands,
    with_scale_rule,
)

__all__ = [
    "OPERANDS",
    "Gemm",
    "Policy",
    "Rotation",
    "Signs",
    "check_policy",
    "map_operands",
    "with_scale_rule",
]
