"""`transform`: the program with `mxjax.dot` and `mxjax.einsum` written by hand, or bit for bit its results.

The same StableHLO has the same results; it is compared because that takes no compilation. For results, cases
are one program, compiled twice. Each has parameters and a loss of its own.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from support.dots import draw
from support.programs import on_devices

import mxjax

POLICY = mxjax.get_policy("wgrad")
X = draw(2, 20, 40, seed=1)
TOKENS = jnp.arange(40).reshape(2, 20) % 24


def matmul(dot, p, x):
    return jnp.tanh(dot("btd,df->btf", x, p["w"]) + p["b"][None, None])


def tied_embedding(dot, p, x):
    return dot("btd,dv->btv", x + p["embed"][TOKENS], p["embed"].T)


def weight_first(dot, p, x):
    return dot("btd,dhk->bhtk", x, p["w"], first=True)


def two_contracted_axes(dot, p, x):
    return dot("bthk,hkd->btd", x.reshape(2, 20, 4, 10), p["w"])


def fused_and_split(dot, p, x):
    q, k = jnp.split(dot("btd,df->btf", x, jnp.concatenate([p["q"], p["k"]], 1)), 2, axis=-1)
    return dot("btd,df->btf", x, p["both"][:, 8:].reshape(40, 2, 10)[:, 1]) + q + k


def scaled(dot, p, x):
    return dot("btd,df->btf", x, p["w"] * 0.3 + jnp.eye(40, 24))


def experts(dot, p, x):
    return dot("etd,edf->etf", x, p["w"])


def mapped_weights(dot, p, x):
    return jax.vmap(lambda x, w: dot("td,df->tf", x, w))(x, p["w"])


def mapped_rows(dot, p, x):
    return jax.vmap(jax.vmap(lambda x: dot("d,df->f", x, p["w"])))(x)


def weight_times_row(dot, p, x):
    """Multiplies as Equinox does."""
    return jax.vmap(jax.vmap(lambda x: dot("d,df->f", x, p["w"].T, first=True)))(x)


def scanned(dot, p, x):
    @jax.checkpoint
    def layer(x, w):
        return jnp.tanh(dot("btd,df->btf", dot("btd,df->btf", x, w), p["shared"]))

    return lax.scan(lambda x, w: (layer(x, w), jnp.sum(x)), x, p["w"])[0]


def indexed(dot, p, x):
    return lax.fori_loop(0, 2, lambda i, x: jnp.tanh(dot("btd,df->btf", x, p["w"][i])), x)


def recurrent(dot, p, x):
    def step(h, x):
        h = jnp.tanh(dot("bd,df->bf", x, p["x"]) + dot("bd,df->bf", h, p["h"]))
        return h, h

    return lax.scan(step, jnp.zeros((2, 24)), x.swapaxes(0, 1))[1]


def branches(dot, p, x):
    def product(x):
        return dot("btd,df->btf", x, p["w"])

    x = lax.cond(x[0, 0, 0] > 0, product, lambda x: x, x)
    return lax.switch(1, [jnp.sin, product, jnp.cos], x)


def nested_jit(dot, p, x):
    @jax.jit
    def inner(w, x):
        return jax.jit(lambda w: dot("btd,df->btf", x, w))(w.T)

    return inner(p["w"], x)


def cast(dot, p, x):
    """Casts as layers with a dtype do: the product by hand quantizes the master weights."""
    lower = jax.jit(lambda t: t.astype(jnp.bfloat16))
    return dot("btd,df->btf", lower(x), lower(p["w"]).T, master=p["w"].T).astype(jnp.float32)


def custom_derivatives(dot, p, x):
    """Holds products in functions with derivatives of their own, which differ from those of the product."""

    @jax.custom_vjp
    def backward(x, w):
        return dot("btd,df->btf", x, w)

    backward.defvjp(
        lambda x, w: (backward(x, w), (x, w)), lambda kept, dy: jax.tree.map(jnp.zeros_like, kept)
    )

    @jax.custom_jvp
    def forward(x, w):
        return dot("btd,df->btf", x, w)

    forward.defjvp(lambda primals, tangents: (forward(*primals), forward(*primals)))
    if dot is by_hand:
        return dot("btd,df->btf", x, p["w"]) + dot("btd,df->btf", x, p["w"])
    return backward(x, p["w"]) + forward(x, p["w"])


def ragged(dot, p, x):
    sizes = jnp.array([7, 0, 13], jnp.int32)
    if dot is by_hand:
        return mxjax.ragged_dot(x[0], p["w"], sizes, policy=POLICY)
    return lax.ragged_dot(x[0], p["w"], sizes)


def shards(dot, p, x):
    mesh, rows = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,)), PartitionSpec("d")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(PartitionSpec(), rows), out_specs=rows)
    def shard(w, x):
        return dot("btd,df->btf", x, w)

    return shard(p["w"], x)


SAME_PROGRAM = {
    matmul: {"w": (40, 24), "b": (24,)},
    tied_embedding: {"embed": (24, 40)},
    weight_first: {"w": (40, 3, 8)},
    two_contracted_axes: {"w": (4, 10, 24)},
    fused_and_split: {"q": (40, 10), "k": (40, 10), "both": (40, 28)},
    scaled: {"w": (40, 24)},
    experts: {"w": (2, 40, 24)},
    mapped_weights: {"w": (2, 40, 24)},
    scanned: {"w": (3, 40, 40), "shared": (40, 40)},
    indexed: {"w": (3, 40, 40)},
    recurrent: {"x": (40, 24), "h": (24, 24)},
    nested_jit: {"w": (24, 40)},
    custom_derivatives: {"w": (40, 24)},
    ragged: {"w": (3, 40, 24)},
    shards: {"w": (40, 24)},
}
SAME_BITS = {
    mapped_rows: {"w": (40, 24)},
    weight_times_row: {"w": (24, 40)},
    branches: {"w": (40, 40)},
    cast: {"w": (24, 40)},
}
"""Cases with a transposition or a conversion elsewhere in the program."""

PARAMS = {
    case.__name__: {name: draw(*shape, seed=i) / 8 for i, (name, shape) in enumerate(shapes.items())}
    for case, shapes in (SAME_PROGRAM | SAME_BITS).items()
}


def plain(spec, x, w, *, first=False, master=None):
    """Multiplies as programs without mxjax do."""
    if not first:
        return jnp.einsum(spec, x, w)
    inputs, result = spec.split("->")
    return jnp.einsum(",".join(reversed(inputs.split(","))) + "->" + result, w, x)


def by_hand(spec, x, w, *, first=False, master=None):
    w = w if master is None else master
    return mxjax.einsum(spec, x, w, policy=POLICY, preferred_element_type=x.dtype)


def losses(dot, cases, params, x):
    """Returns the sum over cases, and each case's own."""
    values = {case.__name__: jnp.sum(case(dot, params[case.__name__], x) ** 2) for case in cases}
    return sum(values.values()), values


def gradients(dot, cases):
    """Returns a function of all parameters that returns gradients and losses."""
    f = functools.partial(losses, dot, cases)
    return jax.jit(jax.grad(f if dot is by_hand else mxjax.transform(f, POLICY), has_aux=True))


@pytest.mark.parametrize("case", SAME_PROGRAM, ids=lambda case: case.__name__)
def test_it_lowers_to_the_program_written_by_hand(case):
    texts = [gradients(dot, [case]).lower(PARAMS, X).as_text() for dot in (plain, by_hand)]
    transformed, expected = (re.sub(r"@\w+", "@", text) for text in texts)  # without functions' names
    assert transformed == expected


def test_results_that_are_no_arrays_stay_what_they_are():
    def f(p, x):
        return {"y": jnp.sum(x @ p), "constant": X, "count": 3, "name": "loss", "numpy": np.float32(2)}

    plain, transformed = (run(jnp.ones((40, 2)), X) for run in (f, mxjax.transform(f, POLICY)))
    found = {name: type(value) for name, value in transformed.items()}
    assert found == {name: type(value) for name, value in plain.items()}
    assert all(transformed[name] == plain[name] for name in ("count", "name", "numpy"))


MOVES = {
    "broadcast": lambda w: jnp.broadcast_to(w, (2, *w.shape))[1],
    "gather": lambda w: w[jnp.arange(39, -1, -1)],
    "mask": jnp.tril,
    "pad": lambda w: jnp.pad(w, ((0, 0), (0, 8))),
    "stack": lambda w: jnp.stack([w, w])[0],
    "stop": lax.stop_gradient,
    "tile": lambda w: jnp.tile(w, (1, 2)),
    "update": lambda w: lax.dynamic_update_slice(w, w[:2], (9, 0)),
    "zeros": lambda w: jnp.concatenate([w, jnp.zeros((40, 8), w.dtype)], 1),
}


def test_a_cast_before_elements_move_is_skipped():
    x, w = X.astype(jnp.bfloat16), draw(40, 24, seed=2)

    def plain(w, x):
        return {name: x @ move(w.astype(x.dtype)) for name, move in MOVES.items()}

    def by_hand(w, x):
        dot = functools.partial(mxjax.dot, policy=POLICY, preferred_element_type=x.dtype)
        return {name: dot(x, move(w)) for name, move in MOVES.items()}

    actual, expected = (jax.jit(f)(w, x) for f in (mxjax.transform(plain, POLICY), by_hand))
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_a_constant_that_the_master_weight_cannot_hold_keeps_the_cast():
    w = draw(40, 24, seed=2, dtype=jnp.bfloat16)
    f = mxjax.transform(
        lambda w, x: x @ jnp.pad(w.astype(x.dtype), ((0, 8), (0, 0)), constant_values=0.1), POLICY
    )
    assert "x float32" in str(f.report(w, draw(20, 48, seed=1)))


@functools.cache
def results():
    return [gradients(dot, list(SAME_BITS))(PARAMS, X) for dot in (plain, by_hand)]


@pytest.mark.slow
@pytest.mark.parametrize("case", [case.__name__ for case in SAME_BITS])
def test_it_has_the_bits_of_what_is_written_by_hand(case):
    transformed, expected = results()
    for actual, wanted in zip(transformed, expected, strict=True):
        jax.tree.map(np.testing.assert_array_equal, actual[case], wanted[case])


# In a process of its own, since the number of devices is fixed when JAX starts.
ON_FOUR = """
import dataclasses, functools
import jax, jax.numpy as jnp, numpy as np
import mxjax
from jax.sharding import AxisType, PartitionSpec as P

key, fold = jax.random.key(0), jax.random.fold_in
policy = dataclasses.replace(mxjax.get_policy("bf16"), fprop=mxjax.get_policy("full_sr").fprop)

def by_hand(number, *loops):
    return lambda x, w: mxjax.dot(x, w, policy=policy, key=functools.reduce(fold, loops, fold(key, number)))

def plain(number, *loops):
    return jnp.dot

def loss(product, w, x):
    x = jax.jit(lambda x, w: jnp.tanh(product(0)(x, w)))(x, w)

    @jax.shard_map(in_specs=(P(), P("d", None)), out_specs=P("d", None))
    def shards(w, x):
        def step(x, i):
            return jnp.tanh(product(1, i, jax.lax.axis_index("d"))(x, w)), None
        return jax.lax.scan(step, x, jnp.arange(2))[0]

    return jnp.sum(shards(w, x) ** 2)

for kind in (AxisType.Auto, AxisType.Explicit):
    with jax.set_mesh(jax.make_mesh((2, 2), ("d", "t"), axis_types=(kind, kind))):
        w = jax.device_put(jax.random.normal(fold(key, 1), (40, 40)), P())
        x = jax.device_put(jax.random.normal(fold(key, 2), (8, 40)), P("d", None))
        transformed = mxjax.transform(functools.partial(loss, plain), policy)
        actual = jax.jit(jax.value_and_grad(transformed))(w, x, mxjax_key=key)
        expected = jax.jit(jax.value_and_grad(functools.partial(loss, by_hand)))(w, x)
        assert len(transformed.report(w, x).products) == 2
        for a, b in zip(actual, expected):
            assert a.sharding == b.sharding
            np.testing.assert_array_equal(a, b)
print(jax.device_count())
"""


@pytest.mark.slow
def test_on_a_mesh_of_four_devices_it_has_the_bits_of_what_is_written_by_hand():
    assert on_devices(4, ON_FOUR) == [4]
