"""`einsum`: the values of numpy's, and the weight is the second operand whatever the result's order."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from support.dots import assert_same, draw, float64, with_gradients
from support.oracles import types_unchecked

import mxjax

POLICY = mxjax.get_policy("wgrad_hadamard")
SPECS = {
    "btd,ckdh->cbtkh": ((2, 5, 6), (3, 4, 6, 7)),
    "td,fd->ft": ((5, 6), (4, 6)),
    "bthk,hkd->btd": ((2, 5, 3, 4), (3, 4, 6)),
    "bthk,khd->dbt": ((2, 5, 3, 4), (4, 3, 6)),
    "ecd,edf->efc": ((3, 5, 6), (3, 6, 4)),
    "becd,edf->becf": ((2, 3, 5, 6), (3, 6, 4)),
    "...d,df->...f": ((2, 5, 6), (6, 4)),
    "...d, ...df -> f...": ((2, 5, 6), (5, 6, 4)),
    "...td,...df->...tf": ((2, 1, 5, 6), (1, 3, 6, 4)),
    "dt,df": ((6, 5), (6, 4)),
    "tds,dfg->tf": ((5, 6, 2), (6, 4, 3)),
    "d,d->": ((6,), (6,)),
    "t,f->tf": ((5,), (4,)),
}


@pytest.mark.parametrize("spec", SPECS)
def test_einsum_is_that_of_numpy(spec):
    x, w = (draw(*shape, seed=i) for i, shape in enumerate(SPECS[spec]))
    y = mxjax.einsum(spec, x, w, policy="fp32")
    expected = np.einsum(spec, float64(x), float64(w))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5 * np.max(np.abs(expected)))


def test_wgrad_contracts_the_tokens_in_any_order_of_the_result():
    x, w = draw(2, 20, 40, seed=1), draw(3, 2, 40, 7, seed=2)

    def flat(x, w):
        y = mxjax.dot(x, w.transpose(2, 0, 1, 3).reshape(40, 42), policy=POLICY)
        return y.reshape(2, 20, 3, 2, 7).transpose(2, 0, 1, 3, 4)

    ours = functools.partial(mxjax.einsum, "btd,ckdh->cbtkh", policy=POLICY)
    assert_same(with_gradients(ours, x, w), with_gradients(flat, x, w))


def test_experts_are_a_batch():
    x, w = draw(3, 33, 40, seed=1), draw(3, 40, 7, seed=2)
    dims = (((2,), (1,)), ((0,), (0,)))
    ours = functools.partial(mxjax.einsum, "ecd,edf->efc", policy=POLICY)

    def expected(x, w):
        return mxjax.dot_general(x, w, dims, policy=POLICY).swapaxes(1, 2)

    assert_same(with_gradients(ours, x, w), with_gradients(expected, x, w))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("td->t", "needs a spec of two operands"),
        ("td,df,f->t", "needs a spec of two operands"),
        ("tdd,df->tf", "letters that an operand has once"),
        ("btd,df->tf", "got 2 axes for 'btd'"),
        ("td,df->tg", "letters that no operand has"),
        ("...d,df->f", "lacks the ellipsis of an operand"),
        ("t1,1f->tf", "needs letters and"),
        ("td,fd->tf", "axis 'd' is 6 long in x and 4 in w"),
    ],
)
def test_a_spec_that_does_not_fit_raises(spec, message):
    with types_unchecked(), pytest.raises(ValueError, match=message):
        mxjax.einsum(spec, jnp.ones((5, 6)), jnp.ones((6, 4)), policy="fp32")


def test_an_ellipsis_that_does_not_broadcast_raises():
    with pytest.raises(ValueError, match=r"axis of '\.\.\.' is 2 long in x and 3 in w"):
        mxjax.einsum("...td,...df->...tf", jnp.ones((2, 3, 8)), jnp.ones((3, 8, 4)), policy="fp32")
