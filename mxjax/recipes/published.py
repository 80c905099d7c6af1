"""Published FP4 training recipes. Layer tables and phases of a run are not part of a policy."""

import dataclasses

from mxjax.numerics.operand import Operand
from mxjax.policy.policy import Gemm, Policy, Rotation

_MXFP4 = Operand("mxfp4")
_EVEN = Operand("mxfp4", scale_rule="even")
_E4M3 = Operand("fp8_e4m3")
_bf16 = Gemm(Operand("bf16"), Operand("bf16"))


def amazon() -> dict[str, Policy]:
    """Training LLMs with MXFP4, arXiv 2502.20586: both backward GEMMs in MXFP4 with SR and random H64.

    Files below are of amazon-science/mxfp4-llm at 0cc57fe; modes are its BW_USE_MXFP4 (scripts/README.md).
    """
    # patch_override_scripts/microxcaling.patch, `dither_scale`: elements times 3/4, rounded stochastically,
    # and the dequantized operand times 4/3. Here the product is divided by both prescales, which is the same.
    operand = Operand("mxfp4", rounding="stochastic", prescale=0.75)
    # patch_override_scripts/Megatron-LM.patch: one diagonal of random signs for each GEMM and step, then H64
    # along the contracted axis of both operands (HBS=64, the paper's block size g).
    backward = Gemm(operand, operand, Rotation(64, "redrawn"))
    amazon = Policy(fprop=_bf16, dgrad=backward, wgrad=backward)  # mode 3
    no_rotation = dataclasses.replace(backward, rotation=None)  # mode 4
    nearest = Gemm(_MXFP4, _MXFP4, backward.rotation)  # mode 1
    neither = Gemm(_MXFP4, _MXFP4)  # mode 2
    return {
        "amazon": amazon,
        # FW_USE_FP8=1 (scripts/README.md): TransformerEngine's E4M3 in the forward pass.
        "amazon_fp8": dataclasses.replace(amazon, fprop=Gemm(_E4M3, _E4M3)),
        "amazon_no_hadamard": dataclasses.replace(amazon, dgrad=no_rotation, wgrad=no_rotation),
        "amazon_no_sr": dataclasses.replace(amazon, dgrad=nearest, wgrad=nearest),
        "amazon_no_hadamard_no_sr": dataclasses.replace(amazon, dgrad=neither, wgrad=neither),
    }


def _primus_and_lumen() -> dict[str, Policy]:
    """Recipes with weights in 2-D blocks and H16 on Wgrad, for AMD's GPUs."""
    # AMD-AGI/Primus-Turbo at a6a16cd: FP4GemmMXFunction of primus_turbo/pytorch/ops/gemm_fp4.py says what has
    # 2-D blocks (the weight) and H16 (both operands of Wgrad); use_gradient_sr is off by default.
    # csrc/kernels/quantization/quantization_mxfp4.cu: rule even is compute_tile_scale, H16 without signs is
    # rht16_inplace.
    tile = Operand("mxfp4", block_shape=(32, 32), scale_rule="even")
    primus = Policy(fprop=Gemm(_EVEN, tile), dgrad=Gemm(_EVEN, tile), wgrad=Gemm(_EVEN, _EVEN, Rotation(16)))
    even_sr = dataclasses.replace(_EVEN, rounding="stochastic")
    # DaiXindi-AMD/Lumen, lumen/ops/quantize/linear.py at 0109d35: Wgrad's x is rotated and quantized from the
    # original. Until August 2026, as at deaccb4, it was from the packed x of the Fprop (section 5.12 of
    # docs/mxfp4_training_report.md at 1270677), and still is where the forward quantizer does not write both.
    lumen = Policy(primus.fprop, Gemm(even_sr, tile), Gemm(_EVEN, even_sr, Rotation(16)))
    saved = dataclasses.replace(_EVEN, source="dequantized")
    lumen_dequantized = dataclasses.replace(lumen, wgrad=dataclasses.replace(lumen.wgrad, lhs=saved))
    return {"primus_turbo": primus, "lumen": lumen, "lumen_dequantized": lumen_dequantized}


def published() -> dict[str, Policy]:
    """Returns the other published recipes by name."""
    # TetraJet, arXiv 2502.20853, and quantization/QLinear.py of thu-ml/TetraJet-MXFP4Training at bbe9bd6,
    # which numbers its quantizers. Scales are free of truncation: no element is clipped.
    rceil = Operand("mxfp4", scale_rule="rceil")  # Q1, Q2: x and w to nearest
    rceil_sr = dataclasses.replace(rceil, rounding="stochastic")  # Q3, Q5: dy for Dgrad and for Wgrad
    seen = dataclasses.replace(rceil_sr, source="dequantized")  # Q4, Q6: from the w and x of Q2 and Q1
    tetrajet = Policy(fprop=Gemm(rceil, rceil), dgrad=Gemm(rceil_sr, seen), wgrad=Gemm(seen, rceil_sr))

    # Accurate neural training with 4-bit matrix multiplications, arXiv 2112.10769, in MX blocks: gradients
    # are rounded without bias to a logarithmic grid (abstract). So no element may clip.
    clipless = Operand("mxfp4", scale_rule="rceil")
    gradient = Operand("mxfp4_e3m0", scale_rule="rceil", rounding="stochastic")
    chmiel = Policy(Gemm(clipless, clipless), Gemm(gradient, clipless), Gemm(clipless, gradient))

    # Weights alone in MXFP4; their gradient passes straight through the rounding (arXiv 1308.3432).
    bf16 = Operand("bf16")
    seen_weight = Operand("bf16", source="dequantized")
    weight_only = Policy(fprop=Gemm(bf16, _MXFP4), dgrad=Gemm(bf16, seen_weight), wgrad=_bf16)

    # Like `fprop` of the ladder, with the backward pass in MX formats too; of no publication that we know.
    e5m2 = Operand("mxfp8_e5m2", scale_rule="even")
    fp8_backward = Policy(fprop=Gemm(_EVEN, _EVEN), dgrad=Gemm(e5m2, e5m2), wgrad=Gemm(e5m2, e5m2))

    return {
        "weight_only": weight_only,
        **_primus_and_lumen(),
        "tetrajet": tetrajet,
        "chmiel_mx": chmiel,
        "mxfp4_fp8_backward": fp8_backward,
    }


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
