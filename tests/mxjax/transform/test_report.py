"""`transform`'s report, rules, keys and errors, and what it leaves as it is."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from support.dots import FP32, RANDOM_FPROP, assert_same, draw
from support.oracles import types_unchecked

import mxjax

X = draw(4, 40, seed=1)
PARAMS = {
    "blocks": [{"up": draw(40, 24, seed=i), "down": draw(24, 40, seed=i + 9)} for i in range(3)],
    "head": draw(40, 8, seed=5),
    "norm": draw(40, seed=6),
}
PAIR = PARAMS["blocks"][0]["up"], PARAMS["blocks"][0]["down"]


def loss(params, x):
    for block in params["blocks"]:
        x = x * params["norm"][None] + jnp.tanh(x @ block["up"]) @ block["down"]
    scores = x @ x.T
    return jnp.sum(scores @ x @ params["head"])


def policies_of(transformed, *args):
    """Returns the policy of each weight's products."""
    return {f.weight: f.policy for f in transformed.report(*args).found if f.paths}


def test_the_last_rule_that_matches_counts():
    rules = [("blocks.*", "fp8"), ("blocks[-1].*", None), ("*.down", "bf16"), ("*norm*", None)]
    fp8, bf16 = (mxjax.get_policy(name) for name in ("fp8", "bf16"))
    assert policies_of(mxjax.transform(loss, FP32, rules), PARAMS, X) == {
        "blocks.0.up": fp8,
        "blocks.0.down": bf16,
        "blocks.1.up": fp8,
        "blocks.1.down": bf16,
        "blocks.2.up": None,
        "blocks.2.down": bf16,
        "head": FP32,
    }


def test_the_report_says_what_was_found_and_why_it_is_left_alone():
    rules = [("blocks[1:].*", None), ("head", "fp8")]
    shapes = jax.eval_shape(lambda: (PARAMS, X))
    text = str(mxjax.transform(loss, "wgrad", rules).report(*shapes))
    assert text.splitlines() == [
        "3 products in a policy, 6 left alone",
        "wgrad",
        "    0  blocks.0.up    dot_general float32[4,40] x float32[40,24]",
        "    1  blocks.0.down  dot_general float32[4,24] x float32[24,40]",
        "fp8",
        "    8  head           dot_general float32[4,40] x float32[40,8]",
        "left alone",
        "    2  blocks.1.up    dot_general float32[4,40] x float32[40,24]: its policy is None",
        "    3  blocks.1.down  dot_general float32[4,24] x float32[24,40]: its policy is None",
        "    4  blocks.2.up    dot_general float32[4,40] x float32[40,24]: its policy is None",
        "    5  blocks.2.down  dot_general float32[4,24] x float32[24,40]: its policy is None",
        "    6  no weight      dot_general float32[4,40] x float32[40,4]: neither operand is a weight",
        "    7  no weight      dot_general float32[4,4] x float32[4,40]: neither operand is a weight",
    ]


@jax.custom_vjp
def doubled(x, w):
    return x @ w


doubled.defvjp(lambda x, w: (x @ w, w), lambda w, dy: (2 * dy @ w.T, jnp.zeros_like(w)))
mapped = jax.custom_batching.custom_vmap(jnp.dot)
mapped.def_vmap(lambda size, batched, x, w: (x @ w, True))
RAGGED_CONTRACTION = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [1], [])

LEFT_ALONE = {
    "both operands are weights": lambda w, x: x @ (w.T @ w),
    "an outer product contracts no axis": lambda w, x: jnp.einsum("i,j->ij", jnp.arange(4.0), w[0]),
    "a convolution is no product": lambda w, x: lax.conv(x[None], w.reshape(8, 4, 10), (1,), "SAME"),
    "int8 is none of float32, bfloat16": lambda w, x: x.astype(jnp.int8) @ w.T.astype(jnp.int8),
    "is a product of mxjax already": lambda w, x: mxjax.dot(x, w.T, policy="fp32"),
    "neither operand is a weight": lambda w, x: x @ w[jnp.argmax(x, 1)].T,
    "is not of the form x [m, k], w [g, k, n]": lambda w, x: lax.ragged_dot_general(
        x, w, jnp.array([20, 20]), RAGGED_CONTRACTION
    ),
    "does not look inside custom_vmap_call": lambda w, x: mapped(x, w.T),
}


def test_a_weight_times_a_constant_is_a_weight():
    def merged(w, x):
        return x @ (w.T @ jnp.eye(8))

    g = mxjax.transform(merged, "wgrad")
    report = g.report(w := draw(8, 40, seed=2), X)
    found = [(f.policy is None, f.why) for f in report.found]
    assert found == [(True, "no operand is an activation"), (False, "")]
    np.testing.assert_array_equal(
        jax.jit(g)(w, X), jax.jit(lambda w, x: mxjax.dot(x, w.T, policy="wgrad"))(w, X)
    )


@pytest.mark.parametrize("why", LEFT_ALONE)
def test_what_is_left_alone_says_why(why):
    report = mxjax.transform(LEFT_ALONE[why], "wgrad").report(draw(8, 40, seed=2), X)
    assert why in report.left_alone[0].why
    assert why in str(report)


def test_without_a_product_to_change_everything_keeps_its_bits_and_derivatives():
    def f(params, x):
        w = params["w"].astype(jnp.bfloat16)
        x = lax.scan(lambda x, _: (x + doubled(x, params["v"]), None), x, length=2)[0]
        return jnp.sum((x.astype(w.dtype) @ w).astype(jnp.float32) ** 2)

    params = {"w": draw(40, 24, seed=2), "v": draw(40, 40, seed=3) / 40}
    transformed = mxjax.transform(f, "wgrad", [("*", None)])
    runs = [jax.jit(jax.value_and_grad(g))(params, X) for g in (f, transformed)]
    assert_same(*map(jax.tree.leaves, runs))
    found = mxjax.transform(f, "wgrad").report(params, X).products
    assert [f.why for f in found] == ["differentiated through: the custom_vjp rule around it is not used", ""]
    assert [f.operands[1] for f in found] == ["float32[40,40]", "float32[40,24]"]


@pytest.mark.slow
def test_keys_are_folded_by_product_and_loop_index():
    policy, key = mxjax.get_policy("full_sr"), jax.random.key(3)
    params = {"first": draw(40, 40, seed=2), "ws": draw(2, 40, 40, seed=3) / 8}

    def f(params, x, products):
        x = products[0](x, params["first"])
        step = lambda x, i_w: (jnp.tanh(products[1](x, *i_w)), None)  # noqa: E731
        return jnp.sum(lax.scan(step, x, (jnp.arange(2), params["ws"]))[0] ** 2)

    def by_hand(params, x):
        fold = jax.random.fold_in
        return f(
            params,
            x,
            [
                lambda x, w: mxjax.dot(x, w, policy=policy, key=fold(key, 0)),
                lambda x, i, w: mxjax.dot(x, w, policy=policy, key=fold(fold(key, 1), i)),
            ],
        )

    plain = mxjax.transform(lambda params, x: f(params, x, [jnp.dot, lambda x, i, w: x @ w]), policy)
    expected = jax.jit(jax.value_and_grad(by_hand))(params, X)
    actual = jax.jit(jax.value_and_grad(lambda *args: plain(*args, mxjax_key=key)))(params, X)
    assert_same(*map(jax.tree.leaves, (actual, expected)))


def test_a_key_that_is_missing_or_none_raises():
    transformed = mxjax.transform(lambda w, x: x @ w.T, "full_sr")
    with pytest.raises(
        ValueError, match="policy of the weight 'weights' draws random bits and needs mxjax_key="
    ):
        transformed(draw(24, 40, seed=2), X)
    with types_unchecked(), pytest.raises(TypeError, match="key must be a JAX key, got 3"):
        transformed(draw(24, 40, seed=2), X, mxjax_key=3)


def test_the_report_takes_the_key_of_the_call():
    transformed = mxjax.transform(lambda w, x: x @ w.T, "full_sr")
    w, key = draw(24, 40, seed=2), jax.random.key(3)
    assert transformed.report(w, X, mxjax_key=key) == transformed.report(w, X)


def test_jit_and_equinox_find_the_key_in_the_signature():
    f = mxjax.transform(lambda w, x: x @ w.T, RANDOM_FPROP)
    w, key = draw(24, 40, seed=2), jax.random.key(3)
    np.testing.assert_array_equal(eqx.filter_jit(f)(w, X, mxjax_key=key), jax.jit(f)(w, X, mxjax_key=key))
    jax.jit(f, donate_argnames=("mxjax_key",))  # raises without
    assert mxjax.transform(max, None)(3, 4) == 4  # a function in C, without a signature


@pytest.mark.parametrize("method", ["__call__", "report"])
def test_a_key_that_the_function_does_not_take_says_how_to_pass_it(method):
    transformed = mxjax.transform(lambda w, x: x @ w.T, "full_sr")
    with pytest.raises(TypeError, match="argument 'key'; the key of transform's policies is mxjax_key="):
        getattr(transformed, method)(draw(24, 40, seed=2), X, key=jax.random.key(3))


def test_while_loops_run_and_fold_their_index():
    def f(w, x):
        return lax.while_loop(lambda s: s[1] < 2, lambda s: (jnp.tanh(s[0] @ w), s[1] + 1), (x, 0))[0]

    def by_hand(w, x):
        for i in range(2):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(3), 0), i)
            x = jnp.tanh(mxjax.dot(x, w, policy=RANDOM_FPROP, key=key))
        return x

    w = draw(40, 40, seed=2)
    actual = jax.jit(mxjax.transform(f, RANDOM_FPROP))(w, X, mxjax_key=jax.random.key(3))
    np.testing.assert_array_equal(actual, jax.jit(by_hand)(w, X))


def test_it_maps():
    transformed = mxjax.transform(lambda w, x: x @ w, "wgrad")
    xs, w = draw(3, 5, 40, seed=1), draw(40, 24, seed=2)
    np.testing.assert_array_equal(jax.vmap(transformed, (None, 0))(w, xs), transformed(w, xs))


def test_weights_of_two_arguments_take_two_transforms():
    def f(a, b, x):
        return jnp.sum((x @ a @ b) ** 2)

    inner = mxjax.transform(f, "wgrad", weights=1)
    outer = mxjax.transform(inner, "fp8")
    a, b = draw(40, 24, seed=2), draw(24, 16, seed=3)
    assert "1 product in a policy, 1 left alone" in str(outer.report(a, b, X))
    y = mxjax.dot(mxjax.dot(X, a, policy="fp8"), b, policy="wgrad")
    np.testing.assert_array_equal(outer(a, b, X), jnp.sum(y**2))


def test_a_call_without_any_product_raises():
    with pytest.raises(ValueError, match="found no product of an activation and a weight from argument 0"):
        mxjax.transform(lambda norm, x: x * norm[None], "wgrad")(PARAMS["norm"], X)


def test_a_model_that_is_no_pytree_raises():
    class Model(nnx.Module, pytree=False):
        def __init__(self):
            self.w = nnx.Param(PAIR[0])

    with pytest.raises(ValueError, match=r"argument 0, got none in a Model; .* nnx.state\(model\)"):
        mxjax.transform(lambda model, x: x @ model.w[...], "wgrad")(Model(), X)


def test_arguments_that_are_no_arrays_stay_python_values():
    def f(x, params, *, double: bool, act):
        return act(x @ params["w"]) * (2 if double else 1), {"none": None}

    params = {"w": draw(40, 24, seed=2)}
    y, rest = mxjax.transform(f, "fp32", weights=1)(X, params, double=True, act=jnp.tanh)
    np.testing.assert_allclose(y, 2 * jnp.tanh(X @ params["w"]), rtol=1e-5)
    assert rest == {"none": None}


def sgd(params, x):
    return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params, x))


def sgd_of_a_tuple(params, x):
    return jax.grad(lambda params: jnp.sum((x @ params[0] @ params[1]) ** 2))(params)


def tangents(w, x):
    return jax.jvp(lambda x: jnp.tanh(x @ w), (x,), (x,))[1]


def merged(params, x):
    return x @ jnp.concatenate([block["up"] for block in params["blocks"]], axis=1)


@pytest.mark.parametrize(
    ("f", "args", "options", "message"),
    [
        (loss, (PARAMS, X), {"rules": [("*haed*", None)]}, r"'\*haed\*' matches none of 'blocks.\*.down'"),
        (loss, (PARAMS, X), {"rules": [("norm", "fp8")]}, "'norm' of transform matches 'norm', which no"),
        (loss, (PARAMS, X), {"policy": "wgrda"}, "did you mean 'wgrad'"),
        (sgd, (PARAMS, X), {}, "transform the loss alone, jax.grad"),
        (sgd_of_a_tuple, (PAIR, X), {}, "found a gradient of the weight '1' in the"),
        (tangents, (PAIR[0], X), {}, "found a gradient of the weight 'weights' in the"),
        (sgd_of_a_tuple, (PAIR, X), {"rules": [("2", "fp8")]}, "'2' matches none of '0', '1'"),
        (merged, (PARAMS, X), {"rules": [("blocks[0].*", "fp8")]}, "blocks.0.up': fp8, 'blocks.1.up': wgrad"),
        (loss, (PARAMS,), {"weights": 1}, "from positional argument 1, but 1 arrived"),
    ],
    ids=["parameter", "product", "policy", "gradient", "tuple", "forward", "element", "several", "argument"],
)
def test_what_does_not_fit_raises(f, args, options, message):
    with types_unchecked(), pytest.raises(ValueError, match=message):
        mxjax.transform(f, **({"policy": "wgrad"} | options)).report(*args)


@pytest.mark.parametrize("name", ["transpose(0,1)", "jvp(x)"])
def test_a_name_scope_is_no_gradient(name):
    def f(w, x):
        with jax.named_scope(name):
            return x @ w

    (product,) = mxjax.transform(f, "wgrad").report(PAIR[0], X).products
    assert not product.in_gradient


def test_a_gradient_of_one_layer_inside_the_function_is_told():
    """Its only GEMM besides the forward one is Wgrad, of two activations."""

    def step(w, x):
        return w - jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)

    transformed = mxjax.transform(step, "fp32")
    w = draw(40, 24, seed=2)
    (left,) = transformed.report(w, X).left_alone
    assert (left.why, left.in_gradient) == ("neither operand is a weight", True)
    assert "neither operand is a weight, in a gradient" in str(transformed.report(w, X))
    with pytest.warns(UserWarning, match=r"product 1 .* transform the loss alone") as caught:
        transformed(w, X)
    assert caught[0].filename == __file__
    of_examples = mxjax.transform(lambda w, x: jax.vmap(lambda row: step(w, row))(x), "fp32")
    with pytest.warns(UserWarning, match="transform the loss alone"):  # its Wgrad is an outer product
        of_examples(w, X)
    left_as_it_is = mxjax.transform(step, None)
    np.testing.assert_array_equal(left_as_it_is(w, X), step(w, X))  # without a warning


@pytest.mark.parametrize(
    ("f", "options", "message"),
    [
        (PARAMS, {}, "needs a function"),
        (jax.tree_util.Partial(loss, PARAMS), {}, "f holds arrays itself; write transform"),
        (loss, {"rules": "head"}, r"\(pattern, policy\) pairs, got 'head'"),
        (loss, {"rules": [("head",)]}, r"\(pattern, policy\) pairs"),
        (loss, {"weights": "params"}, "argument's number, counted from 0, got 'params'"),
    ],
    ids=["no function", "a model", "a pattern alone", "no policy", "a name"],
)
def test_arguments_of_other_types_raise(f, options, message):
    with types_unchecked(), pytest.raises(TypeError, match=message):
        mxjax.transform(f, "wgrad", **options)
