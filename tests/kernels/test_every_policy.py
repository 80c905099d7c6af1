"""Every named policy's dot and model step lower by every implementation, or say which to use."""

import json

import pytest
from support.marks import parametrize
from support.programs import run_compiled

import mxjax
from mxjax.numerics.formats import get_format

CALLS = ([], ["triton_kernel_call_ffi"])


def lower(*arguments: str) -> list[dict]:
    """Returns what `support.every_policy` prints."""
    return [json.loads(line) for line in run_compiled("support.every_policy", *arguments).splitlines()]


def only_xla_takes(name: str) -> bool:
    """Whether no kernel and no FP8 product exists for a GEMM of the policy: for its formats, or their mix."""
    gemms = mxjax.get_policy(name).gemms.values()
    if any((gemm.lhs.format == "mxfp4") != (gemm.rhs.format == "mxfp4") for gemm in gemms):
        return True
    operands = [o for gemm in gemms for o in (gemm.lhs, gemm.rhs)]
    if any(o.format == "mxfp4" and not o.is_packable for o in operands):
        return True
    return any(o.format != "mxfp4" and get_format(o.format).scale != "none" for o in operands)


def check(programs: list[dict]) -> None:
    """Checks that each program calls kernels or none, or that the named implementation refused the policy."""
    for program in programs:
        named = program.get("implementation") in ("fp8_carriers", "scaled_dot", "triton")
        if named and only_xla_takes(program["policy"]):
            assert program["error"].startswith("NotImplementedError: "), program
            assert "use 'xla', or None" in program["error"]
        else:
            assert program.get("targets") in CALLS, program


MODELS = ["chmiel_mx", "fprop_dgrad", "wgrad_hadamard"]


@parametrize(
    ("what", "backend", "arch"),
    slow=[("some", "hip", "gfx950")],
    exhaustive=[("dots", "hip", "gfx950"), ("dots", "cuda", "sm_90"), ("dots", "cuda", "sm_100")],
)
def test_every_policy_lowers_by_every_implementation(what, backend, arch):
    """Or by two of them, and each of them for some policies."""
    programs = lower(what, backend, arch, *MODELS)
    assert len(programs) == (2 if what == "some" else 5) * len(mxjax.policies()) + 2 * len(MODELS)
    check(programs)
    for program in programs:
        if "head" in program:
            assert ("cast_gradient_kernel" in program["kernels"]) == (arch == "sm_90"), program


@pytest.mark.exhaustive
@pytest.mark.parametrize(("backend", "arch"), [("cuda", "sm_90"), ("hip", "gfx950")])
def test_every_policys_step_lowers_by_every_implementation(backend, arch):
    programs = lower("steps", backend, arch)
    assert len(programs) == 5 * len(mxjax.policies())
    check(programs)
