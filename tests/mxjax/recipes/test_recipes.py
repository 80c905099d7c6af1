"""The named policies, operand by operand, and each run forward and backward."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.dots import assert_near, products, with_gradients
from support.marks import parametrize

import mxjax
from mxjax import Gemm, Operand, Policy, Rotation
from mxjax.numerics.delayed import Scales
from mxjax.policy import map_operands
from mxjax.recipes import __main__ as program
from mxjax.recipes import source
from mxjax.recipes.nvfp4 import UNCLIPPED
from mxjax.recipes.whole_runs import RECIPES

FP8 = (("fp8_e4m3", "fp8_e4m3", None), ("fp8_e5m2", "fp8_e4m3", None), ("fp8_e4m3", "fp8_e5m2", None))
BF16 = ("bf16", "bf16", None)
MXFP4 = ("mxfp4", "mxfp4", None)
SR = ("mxfp4 sr", "mxfp4 sr", None)
RHT = ("mxfp4", "mxfp4", (16, "redrawn"))
H16 = ("mxfp4", "mxfp4", (16, "none"))
H32 = ("mxfp4", "mxfp4", (32, "none"))

# arXiv 2605.09825: (lhs, rhs, rotation) of Fprop (x, w), Dgrad (dy, w) and Wgrad (x, dy).
LADDER = {
    "bf16": (BF16, BF16, BF16),
    "fp8": FP8,
    "fprop": (MXFP4, FP8[1], FP8[2]),
    "fprop_dgrad": (MXFP4, MXFP4, FP8[2]),
    "wgrad": (MXFP4, MXFP4, MXFP4),
    "wgrad_sr": (MXFP4, MXFP4, SR),
    "wgrad_rht": (MXFP4, MXFP4, RHT),
    "wgrad_hadamard": (MXFP4, MXFP4, H16),
    "wgrad_hadamard32": (MXFP4, MXFP4, H32),
    "full_sr": (SR, SR, SR),
    "full_rht": (RHT, RHT, RHT),
    "full_hadamard": (H16, H16, H16),
    "full_hadamard32": (H32, H32, H32),
}

_bf16 = Gemm(Operand("bf16"), Operand("bf16"))
_amazon = Operand("mxfp4", scale_rule="floor", rounding="stochastic", prescale=3 / 4)
_backward = Gemm(_amazon, _amazon, Rotation(64, "redrawn"))
_even = Operand("mxfp4", scale_rule="even")
_tile = Operand("mxfp4", scale_rule="even", block_shape=(32, 32))
_rceil = Operand("mxfp4", scale_rule="rceil")
_nv, _nv_tile = Operand("nvfp4"), Operand("nvfp4", block_shape=(16, 16))
_nv_sr = Operand("nvfp4", rounding="stochastic")
_uniform = Operand("mxfp4_e1m2", scale_rule="rceil")
_uniform_sr = Operand("mxfp4_e1m2", scale_rule="rceil", rounding="stochastic")
_uniform_fp32 = Operand("fp4_e1m2")
_uniform_fp32_sr = Operand("fp4_e1m2", rounding="stochastic")
_double = Operand("nvfp4_1x128")
_double_sr = dataclasses.replace(_double, rounding="stochastic")
_double_seen = dataclasses.replace(_double_sr, source="dequantized")
_h16 = Rotation(16, "redrawn")
_ue5m3 = Operand("fp4_ue5m3", scale_max=448)
_ue5m3_tile = dataclasses.replace(_ue5m3, block_shape=(16, 16))
_ue5m3_sr = dataclasses.replace(_ue5m3, rounding="stochastic")
_e3m0_sr = Operand("mxfp4_e3m0", scale_rule="rceil", rounding="stochastic")

PUBLISHED = {
    "amazon": Policy(_bf16, _backward, _backward),  # arXiv 2502.20586, algorithm 3
    "amazon_fp8": Policy(Gemm(Operand("fp8_e4m3"), Operand("fp8_e4m3")), _backward, _backward),
    "amazon_no_hadamard": Policy(_bf16, Gemm(_amazon, _amazon), Gemm(_amazon, _amazon)),
    # Without stochastic rounding there is no bias for the prescale to remove.
    "amazon_no_sr": Policy(_bf16, *[Gemm(rotation=Rotation(64, "redrawn"))] * 2),
    "amazon_no_hadamard_no_sr": Policy(_bf16, Gemm(), Gemm()),
    "primus_turbo": Policy(Gemm(_even, _tile), Gemm(_even, _tile), Gemm(_even, _even, Rotation(16))),
    "nvfp4": Policy(Gemm(_nv, _nv_tile), Gemm(_nv_sr, _nv_tile), Gemm(_nv, _nv_sr, Rotation(16, "fixed"))),
    "averis": Policy(  # arXiv 2603.10444: nvfp4 without its rotation, the means of x and dy apart
        Gemm(Operand("nvfp4", split="mean"), _nv_tile),
        Gemm(Operand("nvfp4", rounding="stochastic", split="mean"), _nv_tile),
        Gemm(Operand("nvfp4", split="mean"), Operand("nvfp4", rounding="stochastic", split="mean")),
    ),
    "uniform4": Policy(  # arXiv 2606.20381: rotations everywhere, stochastic rounding of dy alone
        Gemm(_uniform, _uniform, Rotation(16, "redrawn")),
        Gemm(_uniform_sr, _uniform, Rotation(16, "redrawn")),
        Gemm(_uniform, _uniform_sr, Rotation(16, "redrawn")),
    ),
    "uniform4_fp32": Policy(
        Gemm(_uniform_fp32, _uniform_fp32, Rotation(16, "redrawn")),
        Gemm(_uniform_fp32_sr, _uniform_fp32, Rotation(16, "redrawn")),
        Gemm(_uniform_fp32, _uniform_fp32_sr, Rotation(16, "redrawn")),
    ),
    "chmiel_mx": Policy(Gemm(_rceil, _rceil), Gemm(_e3m0_sr, _rceil), Gemm(_rceil, _e3m0_sr)),
    # arXiv 2510.27527; linear.py in its code
    "tetrajet_v2": Policy(
        Gemm(_double, _double), Gemm(_double_sr, _double_seen, _h16), Gemm(_double_seen, _double_sr, _h16)
    ),
    "ue5m3": Policy(  # arXiv 2609.02846, table 5
        Gemm(_ue5m3, _ue5m3_tile), Gemm(_ue5m3_sr, _ue5m3_tile), Gemm(_ue5m3, _ue5m3_sr)
    ),
}

# Relative mean squared error of one Gaussian operand: of each format to nearest, then what differs from it.
NOISE = {
    "fp32": 0.0,
    "bf16": 2.8e-6,
    "fp8_e4m3": 7.0e-4,
    "fp8_e5m2": 2.8e-3,
    "mxfp8_e4m3": 7.0e-4,
    "mxfp8_e5m2": 2.8e-3,
    "fp4_e1m2": 7.3e-3,
    "nvfp4 4/6": 7.6e-3,
    "nvfp4": 9.0e-3,
    "nvfp4_1x128": 9.0e-3,
    "fp4_ue5m3": 9.0e-3,
    "nvfp4 eden": 9.7e-3,
    "mxfp4": 1.32e-2,
    "mxfp4_e1m2": 2.07e-2,
    "nvfp4 2-D": 1.24e-2,
    "nvfp4 4/6 2-D": 1.24e-2,
    "fp4_ue5m3 2-D": 1.24e-2,
    "fp4_e1m2 sr": 1.46e-2,
    "nvfp4 4/6 sr": 1.75e-2,
    "nvfp4 sr": 1.88e-2,
    "nvfp4_1x128 sr": 1.88e-2,
    "fp4_ue5m3 sr": 1.88e-2,
    "nvfp4 unclipped sr": 2.35e-2,
    "mxfp4 sr": 2.7e-2,
    "mxfp4_e1m2 sr": 4.15e-2,
    "mxfp4_e3m0 sr": 8.2e-2,
}


def summary(operand: Operand) -> str:
    options = {
        " 4/6": operand.four_over_six is not None,
        " eden": operand.eden is not None,
        " 2-D": operand.block_shape == (16, 16),
        " unclipped": operand.scale_target == UNCLIPPED and operand.four_over_six is None,
        " sr": operand.rounding == "stochastic",
    }
    return operand.format + "".join(option for option, used in options.items() if used)


def gemm_summary(gemm: Gemm) -> tuple:
    rotation = gemm.rotation and (gemm.rotation.size, gemm.rotation.signs)
    return summary(gemm.lhs), summary(gemm.rhs), rotation


@pytest.mark.parametrize("name", LADDER)
def test_a_rung_of_the_ladder_has_its_operands(name):
    """By the floor rule, and nothing else."""
    policy = mxjax.get_policy(name)
    assert tuple(policy.gemms) == ("fprop", "dgrad", "wgrad")
    assert tuple(gemm_summary(gemm) for gemm in policy.gemms.values()) == LADDER[name]
    assert map_operands(policy, lambda o: Operand(o.format, rounding=o.rounding)) == policy


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_recipe_has_its_operands(name):
    assert mxjax.get_policy(name) == PUBLISHED[name]


def test_lumen_takes_wgrads_x_from_the_original_or_from_the_saved_operand():
    lumen, saved = mxjax.get_policy("lumen"), mxjax.get_policy("lumen_dequantized")
    nearest, stochastic = Operand(scale_rule="even"), Operand(scale_rule="even", rounding="stochastic")
    assert lumen.wgrad == Gemm(nearest, stochastic, Rotation(16))
    seen = dataclasses.replace(nearest, source="dequantized")
    assert saved == dataclasses.replace(lumen, wgrad=Gemm(seen, stochastic, Rotation(16)))


def test_weight_only_is_the_straight_through_estimator():
    """Against JAX's own gradients of a product with w + stop_gradient(q(w) - w)."""
    (x, w, dy), _ = exact_products()
    x, dy = (jnp.asarray(t, jnp.bfloat16).astype(jnp.float32) for t in (x, dy))

    def straight_through(x, w):
        quantized = mxjax.dequantize(mxjax.quantize(w, axis=0))
        return jnp.matmul(x, w + jax.lax.stop_gradient(quantized - w), precision="highest")

    found = products(x, jnp.asarray(w), dy, policy="weight_only", implementation="reference")
    assert_near(found, with_gradients(straight_through, x, jnp.asarray(w), dy=dy), 1e-6, 1e-5)


def test_policies_lists_every_name_once_with_the_ladder_first():
    names = list(mxjax.policies())
    assert len(set(mxjax.policies().values())) == len(names)
    assert [name for name in names if name in LADDER] == list(LADDER)
    first_published = min(names.index(name) for name in PUBLISHED)
    assert all(names.index(name) < first_published for name in LADDER)
    assert all(mxjax.get_policy(name) is policy for name, policy in mxjax.policies().items())


def test_every_policy_has_a_source_and_no_other_name():
    assert all(source(name) for name in mxjax.policies())
    assert source("amazon_no_sr") == source("amazon") != source("wgrad") == source("bf16")


def test_policies_cannot_be_changed():
    with pytest.raises(TypeError):
        mxjax.policies()["mine"] = Policy()  # pyright: ignore[reportIndexIssue]


LISTS_ALL = "`python -m mxjax.recipes` lists all"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own.json", "unknown policy 'own.json': it is a file; read it by mxjax.policy_from_json"),
        ("mxfp4", "unknown policy 'mxfp4': it is a format; policies with it are fprop, fprop_dgrad, wgrad"),
        ("wgrad_hadamar", "unknown policy 'wgrad_hadamar'; did you mean 'wgrad_hadamard'"),
        ("fprop-dgrad", "unknown policy 'fprop-dgrad'; did you mean 'fprop_dgrad'"),
        ("amazn", "unknown policy 'amazn'; did you mean 'amazon'"),
        ("qqqqqq", f"unknown policy 'qqqqqq'; {LISTS_ALL}"),
        (
            "tetrajet2",
            "unknown policy 'tetrajet2'; did you mean 'tetrajet' or 'tetrajet_v2' or 'tetrajet_v2_reset'? "
            + LISTS_ALL,
        ),
    ],
)
@pytest.mark.parametrize("function", [mxjax.get_policy, source])
def test_an_unknown_policy_is_refused_with_what_it_may_be(function, name, message):
    end = "$" if message.endswith(LISTS_ALL) else ""
    with pytest.raises(ValueError, match=f"^{re.escape(message)}{end}"):
        function(name)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_of_a_whole_run_is_no_policy(name, capsys):
    policy = re.escape(f"its policy is {RECIPES[name].policy!r}")
    with pytest.raises(ValueError, match=f"{name} is a recipe of a whole run: give it alone .*; {policy}"):
        mxjax.get_policy(name)
    program.main([name])
    printed = capsys.readouterr().out
    assert printed == f"{name}, a whole run: {RECIPES[name].source}\n  train.py {RECIPES[name].flags}\n"


def test_the_flags_of_a_whole_run_are_those_of_its_recipe():
    assert RECIPES["primus_deosc"].flags == (
        "--policy primus_turbo --layers 'blocks[:2].*=bf16' 'blocks[-2:].*=bf16' --deoscillate 3:200:1500"
    )
    assert RECIPES["primus_deosc_qkvo"].flags == (
        "--policy lumen --layers 'blocks[0].*=bf16' 'blocks[-2:].*=bf16' '*.attention.qkv=bf16' "
        "'*.attention.out=bf16' --deoscillate 3:100:1000:bf16"
    )
    assert RECIPES["tetrajet_v2_reset"].flags == "--policy tetrajet_v2 --deoscillate 8:200:15001:50"


def test_the_command_prints_every_policy_and_recipe(capsys):
    program.main([])
    printed = capsys.readouterr().out
    assert re.findall(r"^(\w+)[:,]", printed, re.MULTILINE) == [*mxjax.policies(), *RECIPES]


def estimates(policy: Policy) -> bool:
    """Whether gradients are estimates that differ from the product's, however fine the quantization."""
    return any(operand.gradient != "straight_through" for operand in (policy.fprop.lhs, policy.fprop.rhs))


# The others are compared with their authors' code, in test_quartet.py and test_ms_fp4.py.
PLAIN = [name for name, policy in mxjax.policies().items() if not estimates(policy)]


@functools.cache
def exact_products():
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(shape, np.float32) for shape in [(40, 48), (48, 56), (40, 56)])
    return (x, w, dy), (x @ w, dy @ w.T, x.T @ dy)


ALIKE = {
    # They differ little from another.
    *("nvfp4_te", "nvfp4_unclipped", "four_over_six_mae", "ue5m3_no_tensor_scale", "lumen_dequantized"),
    *("ms_fp4_clip", "uniform4_fp32", "amazon_no_hadamard", "amazon_no_sr", "full_hadamard32"),
    # Their products are compared with their authors' code, or with formulas, by the modules beside this one.
    *("amazon", "averis", "four_over_six", "quartet2", "tetrajet", "tetrajet_v2", "uniform4"),
    # Each of their GEMMs is another policy's too.
    *("fprop", "fprop_dgrad", "wgrad_sr", "wgrad_rht", "wgrad_hadamard", "wgrad_hadamard32"),
}


# Lengths that no block or rotation divides, so that every policy pads.
@parametrize("name", *(n for n in PLAIN if n not in ALIKE), exhaustive=[n for n in PLAIN if n in ALIKE])
def test_every_policy_runs_with_the_error_of_its_formats(name):
    policy = mxjax.get_policy(name)
    (x, w, dy), exact = exact_products()

    # Not jitted as a whole: the GEMMs are, each compiled once for all policies that have it.
    scales = Scales(
        *(np.float32(m) / np.abs(t).max() for m, t in zip((448, 448, 57344), (x, w, dy), strict=True))
    )
    found = products(x, w, dy, jax.random.key(0), policy=policy, scales=scales)
    for gemm, e, p in zip(policy.gemms.values(), exact, found, strict=True):
        error = np.mean((p - e) ** 2) / np.mean(e**2)
        expected = sum(NOISE[summary(operand)] for operand in (gemm.lhs, gemm.rhs))
        if gemm.rhs == Operand("bf16", source="dequantized"):  # holds exactly what Fprop's quantization left
            expected = NOISE[summary(gemm.lhs)] + NOISE[summary(policy.fprop.rhs)]
        elif gemm.rotation and "dequantized" in (gemm.lhs.source, gemm.rhs.source):  # no longer on the grid
            expected += NOISE[summary(policy.fprop.rhs)]
        # Zeros that fill up the rotation, and values that are on the grid already, lower the error.
        assert 0.5 * expected <= error <= 1.35 * expected + 1e-12, gemm
