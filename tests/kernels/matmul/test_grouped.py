"""Grouped GEMMs against products in float64, and `ragged_dot` by kernels against the definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.dots import assert_close, assert_same
from support.gpu import HAS_GPU
from support.marks import parametrize
from test_fp4_gemm import GFX950, HERE, built_for, decode, draw

import mxjax
from mxjax.kernels.matmul import grouped
from mxjax.kernels.quantize.filled import quantize_filled, takes_filled
from mxjax.operands.carriers import carry
from mxjax.operands.kernel_operand import pack_by_definition
from mxjax.operands.use import OperandUse
from mxjax.policy import Rotation
from mxjax.products.expert_products import EXPERT_CARRIERS
from mxjax.products.expert_rows import runs_of

pytestmark = pytest.mark.usefixtures("kernels_run")

SIZES, ROWS = (300, 0, 57), 400


@functools.cache
def runs(run=256):
    return runs_of(jnp.array(SIZES), ROWS, run, rest=True)


def places():
    r = runs()
    return grouped.Places(r.experts, r.starts, r.ends, r.run, r.rows)


def by_expert(product):
    """Returns a product for each expert that has rows, of the slice of its rows, and of its runs' rows."""
    found = []
    for i, size in enumerate(SIZES):
        begin, first = sum(SIZES[:i]), 256 * int(runs().starts[i])
        found.append(product(i, slice(begin, begin + size), slice(first, 256 * int(runs().starts[i + 1]))))
    return found


def rows_and_wanted(rng, k, low, high):
    """Returns operands of rows, their products in float64, and those of the magnitudes."""
    lhs, rhs = draw(rng, (), ROWS, k, low, high), draw(rng, (3,), 70, k, low, high)
    x, y = decode(*lhs), decode(*rhs)
    wanted, sizes = np.zeros((ROWS, 70)), np.zeros((ROWS, 70))
    for i, rows in by_expert(lambda i, rows, _: (i, rows)):
        wanted[rows], sizes[rows] = x[rows] @ y[i].T, abs(x[rows]) @ abs(y[i]).T
    return jax.jit(lambda *lhs: [runs().filled(t) for t in lhs])(*lhs), rhs, wanted, sizes


def sums_and_wanted(rng, low, high):
    """Returns the same of sums."""
    lhs, rhs = (draw(rng, (), rows, 256 * runs().number, low, high) for rows in (65, 33))
    x, y = decode(*lhs), decode(*rhs)

    def product(x, y):
        return np.stack(by_expert(lambda i, _, columns: x[:, columns] @ y[:, columns].T))

    return lhs, rhs, product(x, y), product(abs(x), abs(y))


@parametrize(
    ("target", "carriers"),
    *((HERE, None), (HERE, ("e5m2", "e4m3")), (GFX950, None)),
    slow=[(HERE, (carrier, carrier)) for carrier in ("e4m3", "e5m2")],
    ids=str,
)
def test_products_of_like_scales_are_exact(target, carriers):
    """Rows of no expert and experts without rows give zeros."""
    rng = np.random.default_rng(0)
    with built_for(target):
        cases = (
            (rows_and_wanted(rng, 96, 126, 128), jnp.bfloat16),
            (sums_and_wanted(rng, 126, 128), jnp.float32),
        )
        for (lhs, rhs, wanted, _), dtype in cases:
            y = grouped.multiply_packed(tuple(lhs), rhs, places(), dtype, carriers)
            np.testing.assert_array_equal(y, wanted.astype(dtype))


@parametrize("carriers", ("e5m2", "e4m3"), exhaustive=[("e4m3", "e4m3"), ("e5m2", "e5m2")], ids=str)
@parametrize("k", 96, exhaustive=[8224])
def test_what_carriers_lose_is_recomputed(carriers, k):
    """Scales span more than FP8 does, so that rows of both operands lose elements, near and far.

    Hopper's FP8 units align 32 products at a time and keep 13 bits. An element that is lost is off by more.
    """
    rng = np.random.default_rng(1)
    relative = 2.0**-11 if HAS_GPU else k * 2.0**-24
    for lhs, rhs, wanted, sizes in (rows_and_wanted(rng, k, 100, 140), sums_and_wanted(rng, 100, 140)):
        y = np.asarray(grouped.multiply_packed(tuple(lhs), rhs, places(), jnp.float32, carriers), np.float64)
        assert np.all(abs(y - wanted) <= relative * sizes)


def test_the_wgrad_recomputes_no_row_for_an_experts_last_small_token():
    """It is alone in its block."""
    x, _, dy = tensors(ROWS)
    x, dy = (t.at[256].multiply(2.0**-16) for t in (x, dy))
    filled = runs_of(jnp.array([257, 143]), ROWS, 128, rest=True).filled
    use = OperandUse(-2, rotation=Rotation(16), form="packed")
    carried = jax.jit(lambda t, carrier: carry(pack_by_definition(filled(t), use), carrier), static_argnums=1)
    for tensor, carrier in zip((x, dy), EXPERT_CARRIERS["wgrad"], strict=True):
        assert carried(tensor, carrier).fits


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn], ids=["bfloat16", "float8_e4m3fn"])
def test_values_are_multiplied_too(dtype):
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.integers(-8, 8, (ROWS, 48)), dtype)
    w = jnp.asarray(rng.integers(-8, 8, (3, 20, 48)), dtype)
    y = grouped.multiply_values(runs().filled(x), w, places(), jnp.float32)
    wanted = np.zeros((ROWS, 20))
    for part, rows in by_expert(lambda i, rows, _: (x[rows].astype(float) @ w[i].astype(float).T, rows)):
        wanted[rows] = part
    np.testing.assert_array_equal(y, wanted)


@pytest.mark.parametrize("k_first", [False, True])
def test_values_are_summed_and_multiplied_by_factors(k_first):
    rng, r = np.random.default_rng(5), runs()
    lhs, rhs = (jnp.asarray(rng.integers(-8, 8, (m, r.number * 256)), jnp.bfloat16) for m in (136, 24))
    x, y = (np.asarray(t, np.float64) for t in (lhs, rhs))
    wanted = np.stack(by_expert(lambda i, _, columns: x[:, columns] @ y[:, columns].T))
    operands = (lhs.T, rhs.T) if k_first else (lhs, rhs)
    factors = jnp.float32(0.5), jnp.full((1, 1), 3, jnp.float32)
    found = grouped.multiply_values(*operands, places(), jnp.float32, factors, k_first=k_first)
    np.testing.assert_array_equal(found, 1.5 * wanted)


def tensors(rows, span=0):
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (rows, 96)) * jnp.exp2(jnp.round(jnp.linspace(-span, 0, 96)))[None]
    w = 0.02 * jax.random.normal(keys[1], (3, 96, 40))
    return x.astype(jnp.bfloat16), w, 1e-3 * jax.random.normal(keys[2], (rows, 40), jnp.bfloat16)


# On GPUs XLA would otherwise not round what the definition rounds to bfloat16 and then multiplies in float32.
@functools.partial(
    jax.jit,
    static_argnames=("policy", "implementation"),
    compiler_options={"xla_allow_excess_precision": False},
)
def products(x, w, dy, sizes, *, policy, implementation):
    def product(x, w):
        options = {"implementation": implementation, "preferred_element_type": dy.dtype}
        return mxjax.ragged_dot(x, w, sizes, policy=policy, key=jax.random.key(5), **options)

    y, vjp = jax.vjp(product, x, w)
    return y, *vjp(dy)


@parametrize(
    ("policy", "implementation"),
    ("wgrad_hadamard", "fp8_carriers"),
    slow=[
        ("wgrad_hadamard", "triton"),
        ("fp8", "triton"),
        ("fprop", "fp8_carriers"),
        ("bf16", "fp8_carriers"),
    ],
)
def test_ragged_dot_by_kernels_has_the_values_of_the_definition(policy, implementation):
    """Without what no expert reads, which is NaN; scales span forty binades.

    One scale for all experts, which FP8 has, would be NaN for the weights of an expert without rows.
    Sums that err by e, relative to the result, change a rounding to bfloat16, of units up to u = 2**-7, in a
    fraction e/u of cases by u: (e u)**0.5 in the norm. It is below 2e-4 for float32's e of some 2**-22, and
    below 2e-3 for 2**-12 of Hopper's FP8 units.
    """
    bound = 2e-3 if HAS_GPU and policy != "bf16" else 2e-4
    x, w, dy = tensors(150, span=40)
    x, dy = x.at[140:].set(jnp.nan), dy.at[140:].set(jnp.nan)
    w = w.at[1].set(0 if policy in ("fprop", "fp8") else jnp.nan)
    found = products(x, w, dy, jnp.array([100, 0, 40]), policy=policy, implementation=implementation)
    x, w, dy = x.at[140:].set(0), w.at[1].set(0), dy.at[140:].set(0)
    wanted = products(x, w, dy, jnp.array([100, 0, 40]), policy=policy, implementation="reference")
    assert_close(found, wanted, bound)
    assert not np.any(found[0][140:])
    assert not np.any(found[1][140:])
    assert not np.any(found[2][1])


@pytest.mark.slow
def test_one_program_takes_any_sizes():
    """Also mapped, one after another."""
    x, w, dy = (jnp.round(4 * t.astype(jnp.float32)) / 4 for t in tensors(150))
    run = functools.partial(products, x, w, dy, policy="wgrad")
    sizes = jnp.array([(0, 0, 0), (17, 1, 110)])
    found = [run(each, implementation="fp8_carriers") for each in sizes]
    for each, got in zip(sizes, found, strict=True):
        assert_same(got, run(each, implementation="xla"))
    mapped = jax.vmap(functools.partial(run, implementation="fp8_carriers"))(sizes)
    for i, got in enumerate(found):
        assert_same([t[i] for t in mapped], got)


@pytest.mark.slow
@pytest.mark.parametrize("rotation", [None, Rotation(16)])
def test_hoppers_quantizer_fills_up_runs_itself(on_hopper, rotation):
    """As it quantizes a copy that is filled up; what no expert has is zero, though it is NaN."""
    rng = np.random.default_rng(4)
    x = jnp.asarray(rng.standard_normal((ROWS, 136)), jnp.bfloat16).at[sum(SIZES) :].set(jnp.nan)
    uses = [OperandUse(-1, form="packed"), OperandUse(-2, rotation=rotation, form="packed")]
    r = runs(128)
    at = grouped.Places(r.experts, r.starts, r.ends, r.run, r.rows)
    assert takes_filled(x, uses, at.run, at.experts.size * at.run)
    wanted = [pack_by_definition(r.filled(x), use) for use in uses]
    assert_same(jax.tree.leaves(quantize_filled(x, uses, at)), jax.tree.leaves(wanted))


@pytest.mark.skipif(not HAS_GPU, reason="XLA rewrites calls in loops for GPUs alone")
def test_layers_in_a_loop_are_each_by_itself():
    """XLA once let calls that work in place write the loop's arrays, without what they were to begin with."""
    given = [jnp.stack(t) for t in zip(*(tensors(150, span) for span in (40, 0, 20)), strict=True)]
    options = {"sizes": jnp.array(SIZES), "policy": "wgrad_hadamard", "implementation": None}
    run = functools.partial(products.__wrapped__, **options)
    looped = jax.jit(lambda *given: jax.lax.map(lambda each: run(*each), given))(*given)
    for i in range(3):
        assert_same([t[i] for t in looped], jax.jit(run)(*(t[i] for t in given)))


@pytest.mark.skipif(not HAS_GPU, reason="the interpreter sums by numpy")
def test_long_sums_are_within_their_bound_of_float64():
    rng, r = np.random.default_rng(3), runs_of(jnp.array([8192]), 8192, 256, rest=True)
    lhs, rhs = (draw(rng, (), 128, 256 * r.number, 126, 128) for _ in range(2))
    at = grouped.Places(r.experts, r.starts, r.ends, r.run, r.rows)
    [y] = grouped.multiply_packed(lhs, rhs, at, jnp.float32, ("e4m3", "e4m3"))
    wanted = decode(*lhs)[:, :8192] @ decode(*rhs)[:, :8192].T
    assert np.linalg.norm(y - wanted) < 2e-4 * np.linalg.norm(wanted)
