"""`ragged_dot`: for each expert the products of `dot` on its rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.dots import assert_near, assert_same, draw, jitted_products, products, with_gradients
from support.marks import parametrize
from support.oracles import types_unchecked

import mxjax
from mxjax import Gemm, Operand, Policy, Rotation
from mxjax.products.expert_rows import runs_of

X, W, DY = draw(100, 48, seed=1), draw(4, 48, 24, seed=2), draw(100, 24, seed=3)
SIZES = (
    37,
    0,
    5,
    37,
)  # one expert has no token, and 21 tokens have no expert; two share programs


@functools.partial(jax.jit, static_argnames=("policy", "implementation"))
def ragged(x, w, dy, sizes, key=None, **options):
    """Returns y, dx and dw."""
    return products(x, w, dy, key, product=mxjax.ragged_dot, group_sizes=sizes, **options)


def by_expert(x, w, dy, sizes, policy, implementation=None):
    """Returns y, dx and dw by a `dot` for each expert that has rows; what none has is zero."""
    y, dx, dw = np.zeros(dy.shape, np.float32), np.zeros(x.shape, np.float32), np.zeros(w.shape, np.float32)
    for i in np.flatnonzero(sizes):
        rows = slice(sum(sizes[:i]), sum(sizes[: i + 1]))
        y[rows], dx[rows], dw[i] = jitted_products(
            x[rows], w[i], dy[rows], policy=policy, implementation=implementation
        )
    return y, dx, dw


@parametrize(
    ("name", "implementation"),
    ("wgrad_hadamard", "reference"),
    slow=[("wgrad_hadamard", "xla"), ("primus_turbo", "xla"), ("bf16", "reference")],
)
def test_each_expert_has_its_own_products(name, implementation):
    policy = mxjax.get_policy(name)
    actual = ragged(X, W, DY, jnp.array(SIZES), policy=policy, implementation=implementation)
    assert_near(actual, by_expert(X, W, DY, SIZES, policy, implementation), 1e-6)


def test_in_float32_it_is_that_of_lax():
    exact = functools.partial(lax.ragged_dot, group_sizes=jnp.array(SIZES), precision="highest")
    actual = ragged(X, W, DY, jnp.array(SIZES), policy=mxjax.get_policy("fp32"))
    assert_near(actual, with_gradients(exact, X, W, dy=DY), 1e-5)


@parametrize("name", "full_hadamard", slow=["tetrajet_v2", "uniform4_fp32"])
def test_what_one_expert_reads_changes_no_other(name):
    """Neither through blocks, outer scales and rotations, nor through a NaN."""
    options = {"policy": mxjax.get_policy(name), "key": jax.random.key(0)}
    before = ragged(X, W, DY, jnp.array(SIZES), **options)
    after = ragged(X.at[36].mul(1000), W, DY.at[36].set(jnp.nan), jnp.array(SIZES), **options)
    for a, b, first in zip(after, before, (37, 37, 1), strict=True):
        np.testing.assert_array_equal(a[first:], b[first:])
    assert np.all(np.isnan(after[2][0]))


def test_on_cpus_an_experts_weights_meet_its_own_rows_alone():
    w = W.at[2].set(jnp.nan)
    y, dx, _ = ragged(X, w, DY, jnp.array(SIZES), policy="wgrad", implementation="xla")
    for t in (y, dx):
        np.testing.assert_array_equal(np.isnan(t).all(axis=1), np.isin(np.arange(100), np.arange(37, 42)))


EXACT = [jnp.round(4 * t) / 4 for t in jax.tree.map(lambda t: jnp.clip(t, -8, 8), (X, W, DY))]
"""Inputs whose products have few bits, so that float32 sums them exactly in any order."""


@parametrize(
    ("policy", "static"),
    ("wgrad", True),
    slow=[("primus_turbo", False), ("fprop", True), ("fp8", False)],
)
def test_fp8_carriers_give_the_bits_of_xla(policy, static):
    policy, sizes = mxjax.get_policy(policy), np.array(SIZES)
    expected = ragged(*EXACT, sizes, policy=policy, implementation="xla")

    run = functools.partial(products, product=mxjax.ragged_dot, policy=policy, implementation="fp8_carriers")
    by_fp8 = jax.jit(lambda *operands, given: run(*operands, group_sizes=sizes if static else given))
    assert_same(by_fp8(*EXACT, given=jnp.array(sizes)), expected)


@pytest.mark.slow
def test_experts_without_rows_read_and_leave_nothing():
    """The first, the last, and all but one; what no expert reads is NaN."""
    x, w, dy = EXACT[0][:90], EXACT[1], EXACT[2][:90]
    policy = mxjax.get_policy("wgrad")
    poisoned = [t.at[85:].set(jnp.nan) for t in (x, dy)]
    for sizes in [(0, 40, 5, 40), (40, 5, 40, 0), (0, 0, 40, 0)]:
        found = ragged(poisoned[0], w, poisoned[1], jnp.array(sizes), policy=policy, implementation="xla")
        assert_same(found, by_expert(x, w, dy, sizes, policy))


@pytest.mark.parametrize("rest", [False, True])
@pytest.mark.parametrize("sizes", [(300, 0, 57), (0, 0, 0), (400, 0, 0), (1, 398, 1), (300, 200, 9)])
def test_each_experts_rows_begin_a_run(sizes, rest):
    """Rows past the end count for nothing; `experts` is the expert of each run, and places come back."""
    runs = runs_of(jnp.array(sizes), 400, 128, rest=rest)
    kept = np.diff(np.minimum(np.cumsum(sizes), 400), prepend=0)
    x = jnp.broadcast_to(jnp.arange(1.0, 401)[:, None], (400, 2))
    filled = np.asarray(runs.filled(x)).reshape(runs.number, 128, 2)
    owner = np.repeat(np.arange(4), np.append(-(-kept // 128), runs.number))[: runs.number]
    np.testing.assert_array_equal(runs.experts, owner)
    np.testing.assert_array_equal(runs.ends, [0, *np.cumsum(kept), 400])
    for expert, (first, size) in enumerate(zip(runs.starts, kept, strict=False)):
        rows = filled[int(first) : int(runs.starts[expert + 1])].reshape(-1, 2)[:, 0]
        begin = sum(kept[:expert])
        np.testing.assert_array_equal(rows[:size], np.arange(begin + 1, begin + size + 1))
        assert not rows[size:].any()
    np.testing.assert_array_equal(
        runs.by_row(jnp.asarray(filled.reshape(-1, 2)))[: sum(kept)], x[: sum(kept)]
    )
    assert (400 - sum(kept) + 127) // 128 <= runs.number - int(runs.starts[-1]) or not rest


def test_x64_and_strict_promotion_change_nothing():
    expected = ragged(X, W, DY, jnp.array(SIZES), policy="wgrad")
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        assert_same(ragged(X, W, DY, jnp.array(SIZES), policy="wgrad"), expected)


@parametrize(("shape", "implementation"), slow=[((0, 2), "xla"), ((5, 0), "fp8_carriers")])
def test_no_rows_or_no_experts(shape, implementation):
    m, g = shape
    x, w, sizes = jnp.zeros((m, 32)), jnp.zeros((g, 32, 16)), jnp.zeros(g, jnp.int32)
    y, dx, dw = ragged(x, w, jnp.ones((m, 16)), sizes, policy="wgrad", implementation=implementation)
    assert (y.shape, dx.shape, dw.shape) == ((m, 16), x.shape, w.shape)
    assert not dx.any()


def test_the_number_of_rows_may_be_symbolic():
    (rows,) = jax.export.symbolic_shape("rows")
    shapes = [(rows, X.shape[1]), W.shape, (rows, DY.shape[1])]
    run = functools.partial(ragged, sizes=jnp.asarray(SIZES), policy="wgrad_hadamard")
    with types_unchecked():  # a symbolic size is no int
        exported = jax.export.export(jax.jit(run))(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    assert_same(exported.call(X, W, DY), run(X, W, DY))


@pytest.mark.parametrize("forward", [lambda f, x: jax.jvp(f, (x,), (x,)), jax.linearize])
def test_forward_mode_raises(forward):
    w, sizes = jnp.zeros((2, 32, 16)), jnp.array([3, 5])
    with pytest.raises(TypeError, match="have no forward mode"):
        forward(lambda x: mxjax.ragged_dot(x, w, sizes, policy="wgrad"), jnp.zeros((8, 32)))


@parametrize("axes", (None, 2, None), slow=[(0, None, 0)])
def test_vmap_maps_what_it_is_told(axes):
    """Each example has the bits of a call of its own, and shared weights the sum of their gradients."""
    pairs = zip((X, W, jnp.array(SIZES)), axes, strict=True)
    given = [a if axis is None else jnp.stack([a, jnp.flip(a, 0)], axis) for a, axis in pairs]

    def squares(x, w, sizes):
        return jnp.sum(mxjax.ragged_dot(x, w, sizes, policy="wgrad_hadamard") ** 2)

    def of_all(x, w):
        return jnp.sum(jax.vmap(squares, axes)(x, w, given[2]))

    def example(i):
        pairs = zip(given, axes, strict=True)
        return [a if axis is None else jnp.take(a, i, axis) for a, axis in pairs]

    gradients = jax.jit(jax.grad(squares, (0, 1)))
    alone = [gradients(*example(i)) for i in (0, 1)]
    for i, found in enumerate(jax.jit(jax.grad(of_all, (0, 1)))(*given[:2])):
        dx = [gradients[i] for gradients in alone]
        assert_same(found, sum(dx) if axes[i] is None else jnp.stack(dx, axes[i]))


def test_cotangents_alone_may_be_mapped():
    dys = jnp.stack([DY, 2 * DY])
    _, back = jax.vjp(lambda x, w: mxjax.ragged_dot(x, w, jnp.array(SIZES), policy="wgrad_hadamard"), X, W)
    for found, *alone in zip(jax.vmap(back)(dys), back(dys[0]), back(dys[1]), strict=True):
        assert_same(found, jnp.stack(alone))


def test_random_bits_are_replayed_under_remat_and_scan():
    policy, key = mxjax.get_policy("wgrad_sr"), jax.random.key(1)
    run = functools.partial(ragged, policy=policy)
    expected = run(X, W, DY, jnp.array(SIZES), key)
    again = jax.checkpoint(run)(X, W, DY, jnp.array(SIZES), key)
    assert_same(again, expected)
    _, scanned = lax.scan(lambda c, w: (c, run(X, w, DY, jnp.array(SIZES), key)), 0, W[None])
    assert_same([t[0] for t in scanned], expected)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"w": W[:3]}, ValueError, r"needs x \[m, k\], w \[g, k, n\] and group_sizes \[g\], got \(100, 48\)"),
        ({"group_sizes": [50, 50, 0, 0]}, TypeError, "needs group_sizes to be an array, not list"),
        (
            {"implementation": "aiter"},
            NotImplementedError,
            "by implementation 'reference', 'xla', 'fp8_carriers' or 'triton', not 'aiter'",
        ),
        (
            {"implementation": "fp8_carriers", "policy": "nvfp4", "key": jax.random.key(0)},
            NotImplementedError,
            "'fp8_carriers' takes MXFP4",
        ),
        ({"policy": "full_sr"}, ValueError, "needs key="),
        *(
            ({"policy": policy, "key": jax.random.key(0)}, NotImplementedError, message)
            for policy, message in (
                ("quartet", "policy's gradients through the Fprop's"),
                ("averis", "does not take the policy's fprop.lhs.split='mean', "),
                (Policy(Gemm(Operand("fp4_vector"))), "fprop.lhs.format='fp4_vector'"),
                (Policy(wgrad=Gemm(rotation=Rotation(1, order="fixed"))), "wgrad.rotation.order="),
            )
        ),
        ({"group_sizes": jnp.ones(4)}, TypeError, "needs integer group_sizes, got float32"),
        ({"x": X.astype(jnp.int32)}, TypeError, "needs float32, bfloat16 or float16, but"),
        (
            {"group_sizes": np.array([50, 50, 1, 0])},
            ValueError,
            "at most the rows of x, 100, got .* 101 in all",
        ),
        ({"group_sizes": np.array([100, 100, 56, 0], np.uint8)}, ValueError, "256 in all"),
        ({"group_sizes": np.array([50, 60, -10, 0])}, ValueError, "needs group_sizes of 0 or more"),
        ({"policy": "fp8_delayed"}, NotImplementedError, "use current scales, as 'fp8' does"),
    ],
)
def test_bad_arguments_raise(change, error, message):
    arguments = {"x": X, "w": W, "group_sizes": jnp.array(SIZES), "policy": "wgrad"} | change
    with types_unchecked(), pytest.raises(error, match=message):
        mxjax.ragged_dot(**arguments)
