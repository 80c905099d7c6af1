"""Published recipes whose forward pass is more than rounding: other scales, grids, splits or gradients."""

import dataclasses

from mxjax.numerics.operand import Operand
from mxjax.policy.policy import Gemm, Policy, Rotation


def estimators() -> dict[str, Policy]:
    """Returns these recipes by name."""
    mx = Operand("mxfp4_e1m2", scale_rule="rceil")  # a uniform grid (abstract)
    return {
        "uniform4": _uniform4(mx),
        "uniform4_fp32": _uniform4(Operand("fp4_e1m2")),
        "quartet": _quartet(),
        "averis": _averis(),
        **_ms_fp4(),
    }


def _uniform4(uniform: Operand) -> Policy:
    """UFP4, arXiv 2606.20381. No code of its authors is public.

    In the paper 16 elements share a float32 scale (table 1): `uniform4_fp32`. In MX blocks the scale is the
    smallest power of two at which nothing clips.
    """
    gradient = dataclasses.replace(uniform, rounding="stochastic")  # of dy alone (abstract)
    redrawn = Rotation(16, "redrawn")  # random Hadamard rotations of all three GEMMs (abstract)
    return Policy(
        Gemm(uniform, uniform, redrawn), Gemm(gradient, uniform, redrawn), Gemm(uniform, gradient, redrawn)
    )


def _quartet() -> Policy:
    """Quartet, arXiv 2505.14669, algorithm 1; IST-DASLab/Quartet at 00ccd38."""
    quest = Operand("mxfp4", scale_rule="quest", gradient="clipped")  # QuestMXFP4Quantizer
    gradient = Operand("mxfp4", rounding="stochastic", prescale=0.75)  # as in arXiv 2502.20586
    forward = dataclasses.replace(gradient, source="dequantized")  # backward.py, Q(E)Q(Wt)t_Q(Et)Q(Xt)t
    redrawn = Rotation(32, "redrawn")  # the repository draws signs after H, where they change nothing
    return Policy(
        fprop=Gemm(quest, quest, Rotation(32)),
        dgrad=Gemm(gradient, forward, redrawn),
        wgrad=Gemm(forward, gradient, redrawn),
    )


def _averis() -> Policy:
    """Averis, arXiv 2603.10444: the token means of x and dy are split off before quantization (abstract).

    Block shapes and rounding are those of NVFP4's recipe, whose rotation the split replaces. The paper
    quantizes the mean too (equation 11); here it is multiplied in float32. No code of its authors is public.
    """
    x, w = Operand("nvfp4", split="mean"), Operand("nvfp4", block_shape=(16, 16))
    dy = dataclasses.replace(x, rounding="stochastic")
    return Policy(Gemm(x, w), Gemm(dy, w), Gemm(x, dy))


def _ms_fp4() -> dict[str, Policy]:
    """Optimizing LLM training using FP4 quantization, arXiv 2501.17116; Azure/MS-AMP at 9746ea8.

    Backward in FP8, of the values that the Fprop used, as in MS-AMP (megatron/layers.py), whose layers drop
    the outliers instead of multiplying them apart: `ms_fp4_clip`.
    """
    w = Operand("fp4_vector", gradient="dge")  # section 3.1
    e5m2, seen = Operand("fp8_e5m2"), Operand("fp8_e4m3", source="dequantized")

    def policy(x: Operand) -> Policy:
        return Policy(fprop=Gemm(x, w), dgrad=Gemm(e5m2, seen), wgrad=Gemm(seen, e5m2))

    return {
        "ms_fp4": policy(Operand("fp4_vector", split="outliers")),  # section 3.2, quantile .99
        "ms_fp4_clip": policy(Operand("fp4_vector", split="clip")),
    }
