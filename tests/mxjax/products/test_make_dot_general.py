"""`make_dot_general`: in NNX and Linen layers, which operand is the weight, equality, pickling, shardings."""

import functools
import pickle
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support.dots import ASSORTED, RANDOM_FPROP, assert_same, draw, inputs, products, with_gradients

import mxjax
from mxjax import Policy

LINEAR = (((1,), (0,)), ((), ()))
DOT = mxjax.make_dot_general("wgrad")


def nnx_products(layer: nnx.Module, kernel: nnx.Param, x, w, dy):
    """Returns y, dx and dw of an NNX layer with the given weight."""
    kernel.set_value(w)
    gradient, dx = nnx.grad(lambda layer, x: jnp.vdot(layer(x), dy), argnums=(0, 1))(layer, x)
    (dw,) = jax.tree.leaves(gradient)
    return layer(x), dx, dw


def test_make_dot_general_in_an_nnx_linear():
    x, w, dy = inputs()
    key = jax.random.key(2)
    dot_general = mxjax.make_dot_general(ASSORTED, key=key)
    layer = nnx.Linear(48, 56, use_bias=False, dot_general=dot_general, rngs=nnx.Rngs(0))
    assert_same(nnx_products(layer, layer.kernel, x, w, dy), products(x, w, dy, key, policy=ASSORTED))


class KeyedDense(linen.Module):
    """A Linen layer that draws its keys from the "mxjax" stream, and tells which."""

    policy: Policy
    tell: Callable[[jax.Array], None]

    @linen.compact
    def __call__(self, x):
        def draw_key():
            key = self.make_rng("mxjax")
            self.tell(key)
            return key

        dot_general = mxjax.make_dot_general(self.policy, key=draw_key)
        return linen.Dense(56, use_bias=False, dot_general=dot_general)(x)


def test_make_dot_general_in_a_linen_dense():
    x, w, dy = inputs()
    keys = []

    def forward(x, w):
        variables = {"params": {"Dense_0": {"kernel": w}}}
        return KeyedDense(ASSORTED, keys.append).apply(variables, x, rngs={"mxjax": jax.random.key(2)})

    found = with_gradients(forward, x, w, dy=dy)
    assert len(keys) == 1
    assert_same(found, products(x, w, dy, keys[0], policy=ASSORTED))


def test_make_dot_general_passes_the_implementation_on():
    x, w, _ = inputs()
    dot_general = mxjax.make_dot_general("wgrad", implementation="triton")
    with pytest.raises(NotImplementedError, match="'triton' needs a GPU"):
        dot_general(x, w, (((1,), (0,)), ((), ())))


@pytest.mark.parametrize(
    ("kind", "primitive"), [(AxisType.Auto, "sharding_constraint"), (AxisType.Explicit, "reshard")]
)
def test_make_dot_general_takes_an_out_sharding(kind, primitive):
    x, w, _ = inputs()
    mesh = jax.make_mesh((1,), ("d",), axis_types=(kind,))
    spec = PartitionSpec(None, "d")
    run = jax.jit(lambda x, w: DOT(x, w, LINEAR, out_sharding=spec))
    with jax.set_mesh(mesh):
        y, text = run(x, w), str(jax.make_jaxpr(run)(x, w))
    assert f"= {primitive}" in text
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, spec), y.ndim)
    np.testing.assert_array_equal(y, mxjax.dot(x, w, policy="wgrad"))


def test_gradients_of_arrays_on_no_mesh_have_explicit_axes():
    x, w, _ = inputs()
    with jax.set_mesh(jax.make_mesh((1,), ("d",), axis_types=(AxisType.Explicit,))):
        for on_mesh in range(2):
            operands = [
                jax.device_put(t, PartitionSpec("d")) if i == on_mesh else t for i, t in enumerate((x, w))
            ]
            gradients = jax.grad(lambda x, w: DOT(x, w, LINEAR).sum(), (0, 1))(*operands)
            assert all(jax.typeof(g).sharding.mesh.explicit_axes == ("d",) for g in gradients)


@pytest.mark.parametrize(("policy", "message"), [("foo", "unknown policy"), ("full_sr", "needs key=")])
def test_make_dot_general_checks_its_policy_at_once(policy, message):
    with pytest.raises(ValueError, match=message):
        mxjax.make_dot_general(policy)


def test_a_policy_that_draws_nothing_needs_no_stream():
    def never():
        raise AssertionError

    x, w = jnp.ones((4, 64)), jnp.ones((64, 32))
    dot_general = mxjax.make_dot_general("wgrad_hadamard", key=never)
    assert dot_general(x, w, (((1,), (0,)), ((), ()))).shape == (4, 32)


class Keyed(nnx.Module):
    """Two NNX layers that draw their keys from one stream, which is a part of them."""

    def __init__(self, rngs: nnx.Rngs):
        dot_general = nnx.data(mxjax.make_dot_general(RANDOM_FPROP, key=rngs.mxjax))
        self.first = nnx.Linear(48, 48, use_bias=False, dot_general=dot_general, rngs=rngs)
        self.second = nnx.Linear(48, 56, use_bias=False, dot_general=dot_general, rngs=rngs)

    def __call__(self, x):
        return self.second(self.first(x))


def test_an_nnx_stream_advances_under_nnx_jit():
    x = inputs()[0]
    model, keys = Keyed(nnx.Rngs(params=0, mxjax=1)), nnx.Rngs(mxjax=1).mxjax

    def expected(x):
        for layer in (model.first, model.second):
            x = mxjax.dot(x, layer.kernel[...], policy=RANDOM_FPROP, key=keys())
        return x

    run = nnx.jit(nnx.value_and_grad(lambda model, x: jnp.sum(model(x) ** 2)))
    for _ in range(2):
        value, _ = run(model, x)
        np.testing.assert_allclose(value, jnp.sum(expected(x) ** 2), rtol=1e-6)
    assert model.first.dot_general.key is model.second.dot_general.key
    assert model.first.dot_general.key.count[...] == 4


@pytest.mark.slow
def test_the_layers_of_nnx_attention_draw_from_one_stream():
    """Set as docs/integration.md does: attention keeps a `dot_general` that it is given as static."""
    rngs = nnx.Rngs(0, mxjax=1)
    dot_general = nnx.data(mxjax.make_dot_general("wgrad_sr", key=rngs.mxjax))
    attention = nnx.MultiHeadAttention(2, 32, decode=False, rngs=rngs)
    exact, parts = nnx.clone(attention), ("query", "key", "value", "out")
    for part in parts:
        getattr(attention, part).dot_general = dot_general
    x = draw(4, 16, 32, seed=0)
    run = nnx.jit(nnx.grad(lambda model, x: jnp.sum(model(x) ** 2)))
    first, second, reference = run(attention, x), run(attention, x), run(exact, x)
    for part in parts:
        kernels = [gradient[part]["kernel"][...] for gradient in (first, second, reference)]
        assert jnp.any(kernels[0] != kernels[1])
        least = 0.9 if part in ("value", "out") else 0.3  # a softmax's gradient is a difference
        assert mxjax.stats.error(kernels[2], kernels[0]).cosine > least
    assert attention.query.dot_general.key is attention.out.dot_general.key
    assert attention.out.dot_general.key.count[...] == 8


def test_nnx_layers_made_under_vmap_draw_from_streams_of_their_own():
    @nnx.split_rngs(splits=2)
    @nnx.vmap
    def make(rngs):
        dot_general = nnx.data(mxjax.make_dot_general(RANDOM_FPROP, key=rngs.mxjax.fork()))
        return nnx.Linear(48, 48, use_bias=False, dot_general=dot_general, rngs=rngs)

    layers, x = make(nnx.Rngs(0, mxjax=1)), inputs()[0]
    keys = layers.dot_general.key.key[...]
    y = nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(layers, x)
    expected = x
    for kernel, key in zip(layers.kernel[...], keys, strict=True):
        expected = mxjax.dot(expected, kernel, policy=RANDOM_FPROP, key=jax.random.fold_in(key, 0))
    assert_same([y], [expected])
    assert keys[0] != keys[1]


# What jnp.einsum calls for "btd,ckdh->cbtkh": the weight [c, k, d, h] comes first.
SWAPPED = (((2,), (2,)), ((), ()))


def test_the_weight_may_be_on_either_side():
    x, w, _ = inputs()
    y = mxjax.dot(x, w, policy="wgrad_hadamard")
    for side, lhs, rhs, expected in (("rhs", x, w.T, y), ("lhs", w.T, x, y.T)):
        dot_general = mxjax.make_dot_general("wgrad_hadamard", weight=side)
        np.testing.assert_array_equal(dot_general(lhs, rhs, (((1,), (1,)), ((), ()))), expected)


def test_the_weight_on_the_left_has_the_gradients_of_a_weight():
    x, w = draw(2, 20, 40, seed=1), draw(3, 2, 40, 7, seed=2)
    dot_general = mxjax.make_dot_general("wgrad_hadamard", weight="lhs")

    einsum = functools.partial(mxjax.einsum, "btd,ckdh->ckhbt", policy="wgrad_hadamard")
    ours = with_gradients(lambda x, w: dot_general(w, x, SWAPPED), x, w)  # [c, k, h, b, t]
    assert_same(ours, with_gradients(einsum, x, w))


def test_a_product_whose_weight_is_unknown_is_refused():
    x, w = jnp.ones((2, 5, 8)), jnp.ones((3, 4, 8, 6))
    with pytest.raises(ValueError, match=r"cannot tell which operand of .* is the weight; use mxjax\.einsum"):
        jnp.einsum("btd,ckdh->cbtkh", x, w, _dot_general=DOT)
    with pytest.raises(ValueError, match="is the weight"):  # a batch, as in attention
        DOT(x, x, (((2,), (2,)), ((0,), (0,))))


def test_equal_arguments_make_equal_callables():
    def make():
        return mxjax.make_dot_general("full_sr", key=jax.random.key(1), implementation="xla", weight="rhs")

    assert make() == make()
    assert hash(make()) == hash(make())
    assert pickle.loads(pickle.dumps(make())) == make()
    others = [
        mxjax.make_dot_general("full_sr", key=jax.random.key(2), implementation="xla", weight="rhs"),
        mxjax.make_dot_general("full_rht", key=jax.random.key(1), implementation="xla", weight="rhs"),
        mxjax.make_dot_general("full_sr", key=jax.random.key(1), implementation="xla"),
        mxjax.make_dot_general("full_sr", key=jax.random.key(1), weight="rhs"),
    ]
    assert make() not in others


def test_its_repr_is_the_call_that_makes_it():
    assert repr(DOT) == "mxjax.make_dot_general('wgrad')"
    dot_general = mxjax.make_dot_general(ASSORTED, key=jax.random.key, implementation="xla", weight="lhs")
    assert repr(dot_general).startswith("mxjax.make_dot_general(Policy(fprop=Gemm(")
    assert repr(dot_general).endswith("implementation='xla', weight='lhs')")
