"""Published recipes in NVFP4, and in E2M1 with UE5M3 scales.

Layer tables, late switches to higher precision and scales kept for several steps are not part of a policy.

Files named below are of these repositories:

| recipe | repository | commit |
| --- | --- | --- |
| `nvfp4_te`, `four_over_six_mae` | NVIDIA/TransformerEngine | d0067d0 |
| `nvfp4_unclipped`, `quartet2` | IST-DASLab/Quartet-II, src/models/quantization/schemes | 8776a90 |
| `four_over_six` | mit-han-lab/fouroversix | dadfad6 |
| `tetrajet_v2` | thu-ml/TetraJet-v2-NVFP4Training | ca5953f |
"""

import dataclasses

from mxjax.numerics.operand import FourOverSix, Operand
from mxjax.policy.policy import Gemm, Policy, Rotation

TE_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The signs of TransformerEngine's Hadamard transform: `get_wgrad_sign_vector` of
transformer_engine/pytorch/custom_recipes/reference_nvfp4.py."""

UNCLIPPED = 6 * 16 / 17
"""Scale target at which nothing clips: an E4M3 scale is at most 1/17 smaller than what it is rounded from."""

_NV = Operand("nvfp4")
_H16 = Rotation(16, "fixed", values=TE_SIGNS)


def nvfp4() -> dict[str, Policy]:
    """Returns the policies by name."""
    gradient = _stochastic(_NV)
    # Pretraining LLMs with NVFP4, arXiv 2509.25149: H16 for Wgrad, section 4.2; weights in 16 x 16 blocks,
    # 4.3; stochastic rounding of dy alone, 4.4.
    plain = _tiled(_NV, gradient, Rotation(16, "fixed"))
    unclipped = dataclasses.replace(gradient, scale_target=UNCLIPPED)
    return {
        "nvfp4": plain,
        "nvfp4_te": _tiled(_NV, gradient, _H16),
        # arXiv 2601.22813, section 3, and nvidia.py: scales 17/16 as large for dy.
        "nvfp4_unclipped": _tiled(_NV, unclipped, _H16),
        # FP4 All the Way, arXiv 2505.19115: stochastic rounding of dy in both GEMMs, and of x in Wgrad
        # (abstract: of the backward and the update pass, with blocks of 16 and E4M3 scales).
        "fp4_all_the_way": Policy(Gemm(_NV, _NV), Gemm(gradient, _NV), Gemm(gradient, gradient)),
        "four_over_six": _four_over_six("mse"),
        "four_over_six_mae": _four_over_six("mae"),
        "ue5m3": _ue5m3(448),
        "ue5m3_no_tensor_scale": _ue5m3(None),
        "quartet2": _quartet2(),
        "tetrajet_v2": _tetrajet_v2(),
    }


def _stochastic(operand: Operand) -> Operand:
    return dataclasses.replace(operand, rounding="stochastic")


def _tiled(operand: Operand, gradient: Operand, rotation: Rotation | None) -> Policy:
    """Returns a policy with weights in 16 x 16 blocks and dy as `gradient`; Wgrad alone is rotated."""
    weight = dataclasses.replace(operand, block_shape=(16, 16))
    return Policy(Gemm(operand, weight), Gemm(gradient, weight), Gemm(operand, gradient, rotation))


def _four_over_six(error: FourOverSix) -> Policy:
    """Four Over Six, arXiv 2512.02010: every operand chooses its block scales, over `nvfp4_unclipped`.

    From section 3 of the paper: scales up to 256, so that 3/2 of the largest is in range; errors "mse". From
    its repository: weights in 2-D blocks (`weight_scale_2d`, for training: src/fouroversix/model/config.py)
    and gradients `stochastic_unbiased` (scripts/train/configs/transformer_340M_nvfp4_fouroversix.json). "mae"
    is TransformerEngine's default (transformer_engine/common/recipe/__init__.py, `nvfp4_4over6_err_mode`).
    """
    operand = Operand("nvfp4", scale_max=256, four_over_six=error)
    return _tiled(operand, dataclasses.replace(_stochastic(operand), scale_target=UNCLIPPED), _H16)


def _ue5m3(scale_max: int | None) -> Policy:
    """UE5M3 FP4, arXiv 2609.02846, table 5: dy rounded stochastically, weights in 2-D blocks, no rotation.

    The paper's tensor scale maps the largest block to 448 (section 5.2). It keeps the scale for 50 steps;
    here it is that of the current tensor. Without a tensor scale, block scales below 2**-18 become 1.
    """
    operand = Operand("fp4_ue5m3", scale_max=scale_max)
    return _tiled(operand, _stochastic(operand), None)


def _quartet2() -> Policy:
    """Quartet II, arXiv 2601.22813: four over six in Fprop (figure 3), MS-EDEN in the others (section 3.3).

    From quartet_2.py: scale range 255.99, target 6 / (17/16 * 0.93), both backward GEMMs
    rotated by H128 with signs redrawn, x and w as the Fprop's quantization left them. One correction for each
    run of 128 is the code's choice; algorithm 1 of the paper has one for each block of 16, `eden=16`.
    """
    forward = Operand("nvfp4", scale_max=256, four_over_six="mse")
    gradient = Operand("nvfp4", scale_target=6 / (17 / 16 * 0.93), scale_max=255.99, eden=128)
    seen = dataclasses.replace(gradient, source="dequantized")
    rotation = Rotation(128, "redrawn")
    return Policy(Gemm(forward, forward), Gemm(gradient, seen, rotation), Gemm(seen, gradient, rotation))


def _tetrajet_v2() -> Policy:
    """TetraJet-v2, arXiv 2510.27527: NVFP4 with float32 scales in 1 x 128, H16 in the backward pass.

    From olmo2-training/olmo/quantization_real/linear.py and kernels/csrc/quant_fp4.cu: Dgrad and Wgrad round
    all operands stochastically, rotate them with signs redrawn at every step, and read x and w as the Fprop's
    quantization left them. The resets of oscillating weights are not part of a policy. Its outlier
    channels are left out.
    """
    forward = Operand("nvfp4_1x128")
    gradient = _stochastic(forward)
    seen = dataclasses.replace(gradient, source="dequantized")
    rotation = Rotation(16, "redrawn")
    return Policy(Gemm(forward, forward), Gemm(gradient, seen, rotation), Gemm(seen, gradient, rotation))
