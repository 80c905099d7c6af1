"""The policies `ms_fp4` and `ms_fp4_clip`, against MS-AMP's code (tests/golden/make_ms_fp4.py)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from support.dots import assert_near, with_gradients
from support.marks import parametrize
from support.recipes import golden

import mxjax
from mxjax import Gemm, Operand, Policy
from mxjax.operands.split import split

GOLDEN = golden("ms_fp4")
X, W = (mxjax.get_policy("ms_fp4").fprop.lhs, mxjax.get_policy("ms_fp4").fprop.rhs)
SEEN = Operand("fp32", source="dequantized")


def test_outliers_are_those_of_the_repository():
    part, rest = split(GOLDEN["x"], X)
    np.testing.assert_array_equal(part, GOLDEN["clip/part"])
    np.testing.assert_array_equal(rest.astype(jnp.bfloat16), GOLDEN["clip/rest"])


@parametrize(
    ("name", "implementation"),
    *(("ms_fp4", "reference"), ("ms_fp4_clip", "xla")),
    exhaustive=[("ms_fp4", "xla"), ("ms_fp4_clip", "reference")],
)
def test_the_layer_multiplies_what_the_repository_does(name, implementation):
    """With float32 backward GEMMs, which the repository runs in FP8."""
    dy = jax.random.normal(jax.random.key(0), (24, 12))
    exact = Gemm(Operand("fp32"), SEEN), Gemm(SEEN, Operand("fp32"))
    policy = Policy(mxjax.get_policy(name).fprop, *exact)
    run = functools.partial(mxjax.dot, policy=policy, implementation=implementation)
    rest = split(GOLDEN["x"], X).rest * float(name == "ms_fp4")
    x_seen = GOLDEN["x/clip"] + rest
    matmul = functools.partial(jnp.matmul, precision="highest")
    expected = (
        matmul(GOLDEN["x/clip"], GOLDEN["w/quantized"]) + matmul(rest, GOLDEN["w"]),
        matmul(dy, GOLDEN["w/quantized"].T),
        matmul(x_seen.T, dy) * GOLDEN["w/derivative"],
    )
    *found, dw = with_gradients(run, GOLDEN["x"], GOLDEN["w"], dy=dy)
    assert_near(found, expected[:2], 1e-5, 1e-5)
    assert_near([dw], expected[2:], 1e-5, 2**-8)


def test_every_vector_has_its_own_scale_whatever_the_axis():
    """Rows differ by powers of two, which scales take: each GEMM's error is that of plain vectors."""
    vector = Operand("fp4_vector")
    policy = Policy(*[Gemm(vector, vector)] * 3)
    x, w, dy = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(40, 48), (48, 56), (40, 56)]))
    rows, columns = np.exp2(np.arange(40.0))[:, None], np.exp2(np.arange(56.0))[None]
    rows, columns = rows.astype(np.float32), columns.astype(np.float32)

    def y(x, w, implementation="xla"):
        return mxjax.dot(x, w, policy=policy, implementation=implementation)

    np.testing.assert_allclose(y(x * rows, w * columns), y(x, w) * rows * columns, rtol=1e-5)
    for implementation in ("reference", "xla"):
        dx, dw = jax.vjp(functools.partial(y, implementation=implementation), x, w)[1](dy)
        quantize = lambda t, axis: mxjax.dequantize(mxjax.quantize(t, "fp4_vector", axis=axis))  # noqa: E731
        e = jnp.matmul(quantize(dy, 1), quantize(w, 1).T, precision="highest")
        np.testing.assert_allclose(dx, e, rtol=1e-5, atol=1e-4)
        e = jnp.matmul(quantize(x, 0).T, quantize(dy, 0), precision="highest")
        np.testing.assert_allclose(dw, e, rtol=1e-5, atol=1e-4)


def test_vectors_that_are_zero_or_not_finite():
    x = jnp.zeros((3, 40)).at[1, 3].set(jnp.nan).at[2, 5].set(jnp.inf)
    value = mxjax.dequantize(mxjax.quantize(x, "fp4_vector"))
    np.testing.assert_array_equal(value[0], 0)
    assert np.isnan(value[1]).all()
    assert np.isnan(value[2, 5])
