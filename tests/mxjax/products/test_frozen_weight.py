"""`dot` of an `MXArray`, a frozen weight: the products of its values, and neither Wgrad nor its residual."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.dots import assert_same, inputs, with_gradients
from support.marks import parametrize

import mxjax
from examples import lora
from mxjax.policy.policy import with_current_scales
from mxjax.products.dot import warn_of_two_roundings

X, W, DY = inputs()
Q = mxjax.quantize(W, axis=0)


@functools.partial(jax.jit, static_argnames=("policy", "implementation"))
def y_and_dx(x, w, dy, policy, implementation=None):
    options = {"policy": policy, "key": jax.random.key(0), "implementation": implementation}
    return with_gradients(lambda x: mxjax.dot(x, w, **options), x, dy=dy)


@parametrize("policy", "wgrad_hadamard", slow=["tetrajet"])
def test_its_products_are_those_of_its_values(policy):
    assert_same(y_and_dx(X, Q, DY, policy), y_and_dx(X, mxjax.dequantize(Q), DY, policy))


def test_the_fprop_multiplies_its_very_values():
    y = mxjax.dot(X, Q, policy="wgrad", implementation="reference")
    np.testing.assert_array_equal(y, mxjax.dot(X, W, policy="wgrad", implementation="reference"))


@pytest.mark.parametrize("q", [mxjax.quantize(W, "nvfp4", axis=0), mxjax.quantize(W, axis=1, prescale=0.75)])
def test_any_format_and_axis_will_do(q):
    assert_same(y_and_dx(X, q, DY, "fp8"), y_and_dx(X, mxjax.dequantize(q), DY, "fp8"))


def test_blocks_along_the_other_axis_are_warned_of():
    q = mxjax.quantize(W)
    with pytest.warns(UserWarning, match=r"4 bits twice.*quantize\(w, policy\.fprop\.rhs, axis=0\)"):
        mxjax.dot(X, q, policy="wgrad")
    with pytest.warns(UserWarning, match="4 bits twice"):
        jax.eval_shape(jax.vmap(lambda x: mxjax.dot(x, q, policy="fprop")), X)


@pytest.mark.parametrize(
    ("q", "policy", "grids"),
    [
        (mxjax.quantize(W, "nvfp4", axis=0), "wgrad", "nvfp4 .* 16 along d_in x 1 along d_out.* mxfp4 .* 32"),
        (Q, "nvfp4", "mxfp4 with blocks of 32 .* nvfp4 with 16 along d_in x 16 along d_out"),
        (mxjax.quantize(W, axis=0, block_shape=16), "wgrad", "16 along d_in x 1 along d_out, .* 32 "),
        (mxjax.quantize(W, axis=0, prescale=0.75), "wgrad", "32 along d_in x 1 along d_out, .* 32 "),
        (mxjax.quantize(W, "nvfp4", axis=0, block_shape=32), "nvfp4", "32 along d_in"),
    ],
)
def test_other_grids_of_4_bits_are_warned_of(q, policy, grids):
    with pytest.warns(UserWarning, match=f"4 bits twice.*{grids}"):
        jax.eval_shape(lambda: mxjax.dot(X, q, policy=policy, key=jax.random.key(0)))


@pytest.mark.parametrize("name", sorted(mxjax.policies()))
def test_a_weight_made_as_advised_is_not_warned_of(name):
    policy = mxjax.get_policy(name)
    q = mxjax.quantize(W, with_current_scales(policy).fprop.rhs, axis=0, key=jax.random.key(0))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_of_two_roundings(q, policy)
    assert not found


NVFP4, FP8 = (mxjax.quantize(W, name, axis=0) for name in ("nvfp4", "fp8_e4m3"))
BF16 = mxjax.quantize(W, "bf16", axis=0)


@pytest.mark.parametrize(
    ("q", "change", "error", "message"),
    [
        (
            Q,
            {"elements": mxjax.pack(Q)},
            TypeError,
            r"in float4_e2m1fn, got uint8; unpack them: mxjax\.unpack\(",
        ),
        (Q, {"scales": Q.scales.view(jnp.uint8)}, TypeError, r"uint8; .*scales\.view\(jnp\.float8_e8m0fnu\)"),
        (Q, {"scales": None}, TypeError, "scales of mxfp4 in float8_e8m0fnu, got None$"),
        (Q, {"axis": -1}, ValueError, r"scales \(\d+, \d+\) for elements .*, got \("),
        (Q, {"axis": 0}, ValueError, "counted from the end, got 0 of .*: write -2"),
        (NVFP4, {"tensor_scale": None}, TypeError, "the tensor_scale of nvfp4, got None"),
        (FP8, {"tensor_scale": None}, TypeError, "the tensor_scale of fp8_e4m3, got None"),
        (FP8, {"tensor_scale": jnp.ones(3)}, ValueError, r"tensor_scale that broadcasts to \(.*, got \(3,\)"),
        (BF16, {"scales": Q.scales}, TypeError, "scales of bf16 in None, got float8_e8m0fnu"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(q, change, error, message):
    q = dataclasses.replace(q, **change)
    with pytest.raises(error, match=f"dequantize needs .*{message}"):
        mxjax.dequantize(q)
    with pytest.raises(error, match=f"dot needs .*{message}"):
        mxjax.dot(X[..., : q.shape[0]], q, policy="wgrad")


@pytest.mark.parametrize("shape", [(64, 96), (33, 5)])
def test_the_example_saves_and_loads_a_weight(tmp_path, shape):
    q = mxjax.quantize(jax.random.normal(jax.random.key(1), shape), axis=0)
    lora.save(tmp_path / "q.npz", q)
    found = lora.load(tmp_path / "q.npz", shape[0])
    assert jax.tree.structure(found) == jax.tree.structure(q)
    np.testing.assert_array_equal(mxjax.dequantize(found), mxjax.dequantize(q))


@pytest.mark.parametrize(
    ("q", "policy"),
    [
        (Q, "wgrad"),
        (mxjax.quantize(W, axis=0, block_shape=64), "wgrad"),
        (mxjax.quantize(W), "bf16"),
        (mxjax.quantize(W), "fp8"),
        (mxjax.quantize(W), "quartet"),  # rotates
        (mxjax.quantize(W, "mxfp8_e4m3"), "wgrad"),
        (mxjax.quantize(W, block_shape=(32, 32)), "wgrad"),
    ],
)
def test_other_weights_are_not(q, policy):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        jax.eval_shape(lambda: mxjax.dot(X, q, policy=policy, key=jax.random.key(0)))
    assert not found


def test_the_result_has_the_dtype_of_x():
    assert mxjax.dot(X.astype(jnp.bfloat16), Q, policy="wgrad").dtype == jnp.bfloat16


# FP8 carriers have a product for operands that FP8 cannot represent, too.
@pytest.mark.parametrize(("implementation", "products"), [("xla", 1), ("fp8_carriers", 2)])
def test_nothing_but_the_weight_is_kept_for_the_backward_pass(implementation, products):
    _, vjp = jax.vjp(lambda x: mxjax.dot(x, Q, policy="wgrad", implementation=implementation), X)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(vjp))
    assert kept == Q.elements.nbytes + Q.scales.nbytes
    assert str(jax.make_jaxpr(vjp)(DY)).count("dot_general[") == products  # Dgrad, and no Wgrad


def test_mapped_rows_share_it():
    mapped = jax.vmap(lambda x: mxjax.dot(x, Q, policy="wgrad"))(X)
    np.testing.assert_array_equal(mapped, mxjax.dot(X, Q, policy="wgrad"))


def test_stacked_ones_are_scanned_and_mapped():
    stacked = jax.tree.map(lambda t: jnp.stack([t, t[::-1]]), Q)
    one_by_one = jnp.stack([mxjax.dot(X, q, policy="wgrad") for q in (Q, jax.tree.map(lambda t: t[::-1], Q))])
    dot = functools.partial(mxjax.dot, policy="wgrad")
    scanned = jax.lax.scan(lambda x, q: (x, dot(x, q)), X, stacked)[1]
    np.testing.assert_array_equal(scanned, one_by_one)
    np.testing.assert_allclose(jax.vmap(dot, (None, 0))(X, stacked), one_by_one, rtol=1e-5, atol=1e-5)


def test_a_shape_that_does_not_match_raises():
    with pytest.raises(ValueError, match=r"dot needs x .* and w \[d_in, d_out\], got \(40, 48\)"):
        mxjax.dot(X, mxjax.quantize(W.T), policy="wgrad")
