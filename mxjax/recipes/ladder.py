"""The ladder of arXiv 2605.09825: each rung quantizes one more GEMM to MXFP4, the others stay in FP8."""

import dataclasses

from mxjax.numerics.operand import Operand
from mxjax.policy.policy import Gemm, Policy, Rotation, map_operands

_BF16 = Operand("bf16")
_E4M3 = Operand("fp8_e4m3")
_E5M2 = Operand("fp8_e5m2")
_MXFP4 = Operand("mxfp4")

_bf16 = Gemm(_BF16, _BF16)
_mxfp4 = Gemm(_MXFP4, _MXFP4)
_fp8_baseline = Policy(fprop=Gemm(_E4M3, _E4M3), dgrad=Gemm(_E5M2, _E4M3), wgrad=Gemm(_E4M3, _E5M2))

_INTERVENTIONS: dict[str, tuple[str, Rotation | None]] = {
    "sr": ("stochastic", None),
    "rht": ("nearest", Rotation(16, "redrawn")),
    "hadamard": ("nearest", Rotation(16)),
    "hadamard32": ("nearest", Rotation(32)),
}


def _intervene(gemm: Gemm, name: str) -> Gemm:
    rounding, rotation = _INTERVENTIONS[name]
    lhs, rhs = (dataclasses.replace(o, rounding=rounding) for o in (gemm.lhs, gemm.rhs))
    return Gemm(lhs, rhs, rotation)


def ladder() -> dict[str, Policy]:
    """Returns the rungs, each intervention on Wgrad, and each on all three GEMMs, by name."""
    full = Policy(_mxfp4, _mxfp4, _mxfp4)
    ladder = {
        "fp32": Policy(*[Gemm(Operand("fp32"), Operand("fp32"))] * 3),
        "bf16": Policy(_bf16, _bf16, _bf16),
        "fp8": _fp8_baseline,
        "fp8_delayed": map_operands(_fp8_baseline, lambda o: dataclasses.replace(o, scaling="delayed")),
        "fprop": dataclasses.replace(_fp8_baseline, fprop=_mxfp4),
        "fprop_dgrad": dataclasses.replace(_fp8_baseline, fprop=_mxfp4, dgrad=_mxfp4),
        "wgrad": full,
    }
    for name in _INTERVENTIONS:
        ladder[f"wgrad_{name}"] = dataclasses.replace(full, wgrad=_intervene(_mxfp4, name))
    for name in _INTERVENTIONS:
        ladder[f"full_{name}"] = Policy(*[_intervene(_mxfp4, name)] * 3)
    return ladder
