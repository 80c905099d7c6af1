"""AMD's GEMM by a stand-in for jax-aiter: what it is given, and when it runs."""

import json
import sys
import types

import jax
import jax.extend
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mxjax
from mxjax.kernels.cases.expected import decode
from mxjax.kernels.matmul import aiter, fp4_gemm
from mxjax.kernels.matmul.tiles import AITER, VARIABLE, current_table
from mxjax.kernels.selftest import tune_gemm
from mxjax.runtime.devices import Target, use_target

GFX950 = Target("hip", "gfx950")
M, N, K = 300, 512, 768


@pytest.fixture
def with_aiter(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_aiter", types.ModuleType("jax_aiter"))
    monkeypatch.setitem(sys.modules, "jax_aiter.gemm_fp4", types.ModuleType("jax_aiter.gemm_fp4"))
    aiter._is_registered.cache_clear()
    yield
    aiter._is_registered.cache_clear()


def operands():
    rng = np.random.default_rng(0)
    elements = [rng.integers(0, 256, (1, rows, K // 2), np.uint8) for rows in (M, N)]
    scales = [rng.integers(120, 134, (1, rows, K // 32), np.uint8) for rows in (M, N)]
    return elements[0], scales[0], elements[1], scales[1]


def gemm_fp4_fwd(lhs, rhs, lhs_scales, rhs_scales):
    """Multiplies as AITER's kernels read their operands.

    Source: ROCm/aiter, `shuffle_weight` with layout (16, 16), and `e8m0_shuffle`.
    """
    n, half = rhs.shape
    row, byte = np.indices((n, half))
    tile = (row // 16 * (half // 32) + byte // 32) * 512
    rhs = rhs.ravel()[tile + byte % 32 // 16 * 256 + row % 16 * 16 + byte % 16]
    values = []
    for elements, scales in ((lhs, lhs_scales), (rhs, rhs_scales)):
        rows, blocks = -(-len(elements) // 256) * 256, elements.shape[1] // 16
        assert scales.shape == (rows, blocks)
        row, block = np.indices((len(elements), blocks))
        run = (row // 32 * (blocks // 8) + block // 8) * 256
        place = block % 4 * 64 + row % 16 * 4 + block % 8 // 4 * 2 + row % 32 // 16
        values.append(decode(elements, scales.ravel()[run + place]))
    return (values[0] @ values[1].T).astype(np.float32).astype(ml_dtypes.bfloat16)


@pytest.mark.usefixtures("with_aiter")
def test_operands_have_the_layouts_that_aiter_reads(monkeypatch):
    def ffi_call(name, out, **options):
        assert (name, options) == ("GemmFp4FwdJA", {})
        return lambda *arrays: jax.pure_callback(lambda *a: gemm_fp4_fwd(*map(np.asarray, a)), out, *arrays)

    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)
    lhs, lhs_scales, rhs, rhs_scales = operands()
    with use_target(GFX950):
        got = fp4_gemm.matmul(lhs, lhs_scales, rhs, rhs_scales, jnp.bfloat16, AITER)
    wanted = decode(lhs[0], lhs_scales[0]) @ decode(rhs[0], rhs_scales[0]).T
    np.testing.assert_array_equal(got[0], wanted.astype(np.float32).astype(ml_dtypes.bfloat16))


def calls(function, *arrays):
    """Returns the calls of AITER in a function traced for gfx950: shapes and dtypes, and attributes."""
    with use_target(GFX950):
        jaxpr = jax.make_jaxpr(function)(*arrays).jaxpr
    return list(_calls(jaxpr))


def _calls(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.params.get("target_name") == "GemmFp4FwdJA":
            yield [v.aval.str_short() for v in (*eqn.invars, *eqn.outvars)], eqn.params["attributes"]
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from _calls(inner)


@pytest.mark.usefixtures("with_aiter")
def test_the_gemms_of_a_dot_are_aiters_calls_without_attributes():
    x, w = jnp.zeros((512, K), jnp.bfloat16), jnp.zeros((K, N))

    def step(x, w):
        y, vjp = jax.vjp(lambda *a: mxjax.dot(*a, policy="wgrad", implementation="aiter"), x, w)
        return y, *vjp(y)

    wanted = [
        ([f"uint8[{m},{k // 2}]", f"uint8[{n},{k // 2}]", *_scales(m, n, k), f"bfloat16[{m},{n}]"], ())
        for m, n, k in [(512, N, K), (512, K, N), (K, N, 512)]
    ]
    assert calls(step, x, w) == wanted


def _scales(m, n, k):
    return [f"uint8[{rows},{k // 32}]" for rows in (m, n)]


@pytest.mark.usefixtures("with_aiter")
def test_the_tile_table_chooses_aiter_where_it_was_the_fastest(monkeypatch, tmp_path):
    shape = tune_gemm.GemmShape("mlp.down.fprop", M, N, K)
    cases = [case for case in tune_gemm.gemm_cases([shape], GFX950) if case.tile == AITER]
    [record] = [tune_gemm.measured(case).record() | {"median": 1e-6} for case in cases]
    tune_gemm.save_table(tmp_path / "tiles.json", GFX950, {}, [record])
    assert json.loads((tmp_path / "tiles.json").read_text())["gemms"][0]["tile"] == [0] * 5
    monkeypatch.setenv(VARIABLE, str(tmp_path / "tiles.json"))
    current_table.cache_clear()
    try:
        found = [calls(lambda *a, d=d: fp4_gemm.matmul(*a, d), *operands()) for d in ("bfloat16", "float32")]
    finally:
        current_table.cache_clear()
    assert [len(of_dtype) for of_dtype in found] == [1, 0]  # AITER has no float32 result


def test_refuses_other_machines_and_sizes(with_aiter):
    x, w = jnp.zeros((32, 96), jnp.bfloat16), jnp.zeros((96, 64))
    run = lambda: mxjax.dot(x, w, policy="wgrad", implementation="aiter")  # noqa: E731
    with pytest.raises(NotImplementedError, match="needs a gfx950 GPU"):
        run()
    with use_target(GFX950), pytest.raises(NotImplementedError, match="n and k in multiples of 256"):
        run()
    del sys.modules["jax_aiter.gemm_fp4"], sys.modules["jax_aiter"]
    aiter._is_registered.cache_clear()
    with use_target(GFX950), pytest.raises(NotImplementedError, match="jax-aiter, built from"):
        run()
