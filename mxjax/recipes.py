"""Named policies: the paper's ladder and published FP4 training recipes, as data.

The ladder (arXiv 2605.09825) quantizes one more GEMM to MXFP4 at each rung; the others stay in FP8. Names are
`stage[_intervention]`: `wgrad_X` applies X to the two Wgrad operands only, `full_X` to all six. X is `sr`
(stochastic rounding), `rht` (H16 with signs redrawn at every call), `hadamard` (deterministic H16) or
`hadamard32`.
"""

import dataclasses
import difflib
import types
from collections.abc import Mapping

from mxjax.operand import Operand
from mxjax.policy import Gemm, Policy, Rotation

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


def _ladder() -> dict[str, Policy]:
    full = Policy(_mxfp4, _mxfp4, _mxfp4)
    ladder = {
        "fp32": Policy(*[Gemm(Operand("fp32"), Operand("fp32"))] * 3),
        "bf16": Policy(_bf16, _bf16, _bf16),
        "fp8": _fp8_baseline,
        "fprop": dataclasses.replace(_fp8_baseline, fprop=_mxfp4),
        "fprop_dgrad": dataclasses.replace(_fp8_baseline, fprop=_mxfp4, dgrad=_mxfp4),
        "wgrad": full,
    }
    for name in _INTERVENTIONS:
        ladder[f"wgrad_{name}"] = dataclasses.replace(full, wgrad=_intervene(_mxfp4, name))
    for name in _INTERVENTIONS:
        ladder[f"full_{name}"] = Policy(*[_intervene(_mxfp4, name)] * 3)
    return ladder


def _amazon() -> dict[str, Policy]:
    """Training LLMs with MXFP4, arXiv 2502.20586: both backward GEMMs in MXFP4 with SR and random H64."""
    operand = Operand("mxfp4", rounding="stochastic", prescale=0.75)
    backward = Gemm(operand, operand, Rotation(64, "redrawn"))
    amazon = Policy(fprop=_bf16, dgrad=backward, wgrad=backward)
    no_rotation = dataclasses.replace(backward, rotation=None)
    nearest = Gemm(_MXFP4, _MXFP4, backward.rotation)
    return {
        "amazon": amazon,
        "amazon_fp8": dataclasses.replace(amazon, fprop=Gemm(_E4M3, _E4M3)),
        "amazon_no_hadamard": dataclasses.replace(amazon, dgrad=no_rotation, wgrad=no_rotation),
        "amazon_no_sr": dataclasses.replace(amazon, dgrad=nearest, wgrad=nearest),
    }


def _published() -> dict[str, Policy]:
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
    gradient = Operand("mxfp4_e3m0", scale_rule="rceil", rounding="stochastic")
    chmiel = Policy(Gemm(clipless, clipless), Gemm(gradient, clipless), Gemm(clipless, gradient))

    return {
        "primus_turbo": primus,
        "lumen": lumen,
        "tetrajet": tetrajet,
        "nvfp4": nvfp4,
        "fp4_all_the_way": all_the_way,
        "chmiel_mx": chmiel,
        "mxfp4_fp8_backward": Policy(
            fprop=Gemm(even, even),
            dgrad=Gemm(Operand("mxfp8_e5m2", scale_rule="even"), Operand("mxfp8_e5m2", scale_rule="even")),
            wgrad=Gemm(Operand("mxfp8_e5m2", scale_rule="even"), Operand("mxfp8_e5m2", scale_rule="even")),
        ),
    }


_POLICIES: Mapping[str, Policy] = types.MappingProxyType(_ladder() | _amazon() | _published())


def policies() -> Mapping[str, Policy]:
    """Returns every named policy, the paper's ladder first."""
    return _POLICIES


def get_policy(name: str) -> Policy:
    """Returns the policy called `name`, e.g. "wgrad_hadamard".

    Raises:
      ValueError: unknown name; the message suggests the closest one and lists all.
    """
    if name in _POLICIES:
        return _POLICIES[name]
    close = difflib.get_close_matches(name, _POLICIES, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ValueError(f"unknown policy {name!r}; {hint}the policies are {', '.join(_POLICIES)}")


def as_policy(policy: Policy | str) -> Policy:
    """Returns the policy, looked up if given by name.

    Raises:
      TypeError: neither a policy nor a name.
      ValueError: unknown name.
    """
    if isinstance(policy, str):
        return get_policy(policy)
    if not isinstance(policy, Policy):
        raise TypeError(f"policy must be an mxjax.Policy or a name, got {policy!r}")
    return policy
