"""Published FP4 training recipes. Layer tables and phases of a run are not part of a policy."""

import dataclasses

from mxjax.operand import Operand
from mxjax.policy import Gemm, Policy, Rotation

_MXFP4 = Operand("mxfp4")
_E4M3 = Operand("fp8_e4m3")
_bf16 = Gemm(Operand("bf16"), Operand("bf16"))


def amazon() -> dict[str, Policy]:
    """Training LLMs with MXFP4, arXiv 2502.20586: both backward GEMMs in MXFP4 with SR and random H64."""
    operand = Operand("mxfp4", rounding="stochastic", prescale=0.75)
    backward = Gemm(operand, operand, Rotation(64, "redrawn"))
    amazon = Policy(fprop=_bf16, dgrad=backward, wgrad=backward)
    no_rotation = dataclasses.replace(backward, rotation=None)
    nearest = Gemm(_MXFP4, _MXFP4, backward.rotation)
    neither = Gemm(_MXFP4, _MXFP4)  # BW_USE_MXFP4=2 in scripts/README.md of amazon-science/mxfp4-llm
    return {
        "amazon": amazon,
        "amazon_fp8": dataclasses.replace(amazon, fprop=Gemm(_E4M3, _E4M3)),
        "amazon_no_hadamard": dataclasses.replace(amazon, dgrad=no_rotation, wgrad=no_rotation),
        "amazon_no_sr": dataclasses.replace(amazon, dgrad=nearest, wgrad=nearest),
        "amazon_no_hadamard_no_sr": dataclasses.replace(amazon, dgrad=neither, wgrad=neither),
    }


def published() -> dict[str, Policy]:
    """Returns the other published recipes by name."""
    even = Operand("mxfp4", scale_rule="even")
    tile = Operand("mxfp4", block_shape=(32, 32), scale_rule="even")
    primus = Policy(fprop=Gemm(even, tile), dgrad=Gemm(even, tile), wgrad=Gemm(even, even, Rotation(16)))
    even_sr = dataclasses.replace(even, rounding="stochastic")
    lumen = Policy(primus.fprop, Gemm(even_sr, tile), Gemm(even, even_sr, Rotation(16)))

    # TetraJet, arXiv 2502.20853: the backward pass reads the x and w that the forward pass quantized.
    rceil = Operand("mxfp4", scale_rule="rceil")
    rceil_sr = dataclasses.replace(rceil, rounding="stochastic")
    seen = dataclasses.replace(rceil_sr, source="dequantized")
    tetrajet = Policy(fprop=Gemm(rceil, rceil), dgrad=Gemm(rceil_sr, seen), wgrad=Gemm(seen, rceil_sr))

    # Pretraining LLMs with NVFP4, arXiv 2509.25149 (layer table and late switch are configured elsewhere).
    nv, nv_sr = Operand("nvfp4"), Operand("nvfp4", rounding="stochastic")
    nv_tile = Operand("nvfp4", block_shape=(16, 16))
    nvfp4 = Policy(
        fprop=Gemm(nv, nv_tile), dgrad=Gemm(nv_sr, nv_tile), wgrad=Gemm(nv, nv_sr, Rotation(16, "fixed"))
    )
    # FP4 All the Way, arXiv 2505.19115 (its last phase in high precision is configured elsewhere).
    all_the_way = Policy(Gemm(nv, nv), Gemm(nv_sr, nv), Gemm(nv_sr, nv_sr))

    # Accurate neural training with 4-bit matrix multiplications, arXiv 2112.10769, in MX blocks.
    clipless = Operand("mxfp4", scale_rule="rceil")
    e3m0 = Operand("mxfp4_e3m0", scale_rule="rceil", rounding="stochastic")
    chmiel = Policy(Gemm(clipless, clipless), Gemm(e3m0, clipless), Gemm(clipless, e3m0))

    # UFP4, arXiv 2606.20381: a uniform grid (abstract), random Hadamard rotations of all three GEMMs and
    # stochastic rounding of dy alone (abstract). In MX blocks, whose power of two is such that nothing clips.
    uniform = Operand("mxfp4_e1m2", scale_rule="rceil")
    uniform_sr = dataclasses.replace(uniform, rounding="stochastic")
    redrawn = Rotation(16, "redrawn")
    uniform4 = Policy(
        fprop=Gemm(uniform, uniform, redrawn),
        dgrad=Gemm(uniform_sr, uniform, redrawn),
        wgrad=Gemm(uniform, uniform_sr, redrawn),
    )

    # Quartet, arXiv 2505.14669, algorithm 1: H32 and QuEST forward, with its clip mask in the gradient. The
    # backward GEMMs multiply dy with the dequantized operands of the Fprop; their results are rotated back.
    quest = Operand("mxfp4", scale_rule="quest", gradient="clipped")
    gradient = Operand("mxfp4", rounding="stochastic", prescale=0.75)  # as in arXiv 2502.20586
    forward_operand = dataclasses.replace(gradient, source="dequantized")
    randomized = Rotation(32, "redrawn")  # the repository draws signs after H, where they change nothing
    quartet = Policy(
        fprop=Gemm(quest, quest, Rotation(32)),
        dgrad=Gemm(gradient, forward_operand, randomized),
        wgrad=Gemm(forward_operand, gradient, randomized),
    )

    # Averis, arXiv 2603.10444: the token means of x and dy are split off before quantization (abstract).
    # Block shapes and rounding are those of NVFP4's recipe, whose rotation the split replaces.
    nv_split = Operand("nvfp4", split="mean")
    nv_sr_split = dataclasses.replace(nv_sr, split="mean")
    averis = Policy(Gemm(nv_split, nv_tile), Gemm(nv_sr_split, nv_tile), Gemm(nv_split, nv_sr_split))

    # Optimizing LLM training using FP4 quantization, arXiv 2501.17116: vector-wise FP4 forward, the gradient
    # estimator for weights (section 3.1), outliers past the .99 quantile apart (3.2). Backward in FP8, of the
    # values that the Fprop used, as in MS-AMP, whose layers drop the outliers instead: `ms_fp4_clip`.
    e5m2 = Operand("fp8_e5m2")
    vector, seen_fp8 = Operand("fp4_vector", gradient="dge"), Operand("fp8_e4m3", source="dequantized")
    ms_fp4 = Policy(
        fprop=Gemm(Operand("fp4_vector", split="outliers"), vector),
        dgrad=Gemm(e5m2, seen_fp8),
        wgrad=Gemm(seen_fp8, e5m2),
    )
    ms_fp4_clip = dataclasses.replace(ms_fp4, fprop=Gemm(Operand("fp4_vector", split="clip"), vector))

    # Weights alone in MXFP4; their gradient passes straight through the rounding (arXiv 1308.3432).
    bf16 = Operand("bf16")
    seen_weight = Operand("bf16", source="dequantized")
    weight_only = Policy(fprop=Gemm(bf16, _MXFP4), dgrad=Gemm(bf16, seen_weight), wgrad=_bf16)

    return {
        "weight_only": weight_only,
        "primus_turbo": primus,
        "lumen": lumen,
        "tetrajet": tetrajet,
        "nvfp4": nvfp4,
        "fp4_all_the_way": all_the_way,
        "chmiel_mx": chmiel,
        "uniform4": uniform4,
        "quartet": quartet,
        "averis": averis,
        "ms_fp4": ms_fp4,
        "ms_fp4_clip": ms_fp4_clip,
        "mxfp4_fp8_backward": Policy(
            fprop=Gemm(even, even),
            dgrad=Gemm(Operand("mxfp8_e5m2", scale_rule="even"), Operand("mxfp8_e5m2", scale_rule="even")),
            wgrad=Gemm(Operand("mxfp8_e5m2", scale_rule="even"), Operand("mxfp8_e5m2", scale_rule="even")),
        ),
    }
