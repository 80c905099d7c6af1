"""Arguments that `dot` refuses, and the texts of its errors."""

import functools
import os
import re
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.dots import inputs
from support.oracles import types_unchecked

import mxjax
from mxjax import Gemm, Operand, Policy

LIBRARY = os.path.dirname(mxjax.__file__)


@pytest.mark.parametrize("policy", ["wgrad_sr", "full_sr", "wgrad"])
@pytest.mark.parametrize(
    "key", [jax.random.split(jax.random.key(0), 3), jnp.zeros(2), jnp.zeros((3, 2), "uint32")]
)
def test_several_keys_are_not_one(policy, key):
    x, w, _ = inputs()
    with pytest.raises(TypeError, match=r"must be one JAX key, got an array .*\[[23]"):
        mxjax.dot(x, w, policy=policy, key=key)
    with pytest.raises(TypeError, match="must be one JAX key"):
        mxjax.quantize(x, rounding="stochastic", key=key)


@pytest.mark.parametrize(
    ("x_shape", "w_shape"), [((4, 5), (4, 5)), ((4, 5), (5,)), ((4, 5), (2, 5, 3)), ((), (5, 3))], ids=str
)
def test_shapes_that_do_not_match_raise(x_shape, w_shape):
    with types_unchecked(), pytest.raises(ValueError, match=re.escape(f"got {x_shape} and {w_shape}")):
        mxjax.dot(jnp.ones(x_shape), jnp.ones(w_shape), policy="wgrad")


@pytest.mark.parametrize(
    ("x_dtype", "w_dtype", "name"),
    [
        ("int32", "float32", "x"),
        ("float32", "int8", "w"),
        ("float8_e4m3fn", "float32", "x"),
        ("float32", "float4_e2m1fn", "w"),
    ],
)
def test_other_dtypes_raise(x_dtype, w_dtype, name):
    with pytest.raises(TypeError, match=rf"bfloat16 or float16, but .hs \({name}\) is (int|float)[348]"):
        mxjax.dot(jnp.ones((4, 5), x_dtype), jnp.ones((5, 3), w_dtype), policy="wgrad")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w: mxjax.dot_general(x, mxjax.quantize(w), (), policy="bf16"), r"mxjax\.dequantize"),
        (
            lambda x, w: mxjax.dot(x, w, policy="bf16", preferred_element_type="bf16"),
            r"preferred_element_type, such as jnp\.bfloat16, got 'bf16'",
        ),
        (
            lambda x, w: mxjax.dot(np.ones((2, 3), ">f4"), w, policy="bf16"),
            r"this machine's byte order, got >f4; pass x\.astype",
        ),
        (lambda x, w: mxjax.einsum(None, x, w, policy="bf16"), r"a spec such as 'btd,df->btf', got None"),
        (
            lambda x, w: mxjax.dot_general(x, w, None, policy="bf16"),
            r"needs dimension_numbers \(\(lhs contracting, rhs contracting\).*got None",
        ),
        (lambda x, w: Gemm("wgrad", "bf16"), r"needs lhs to be .*write Operand\('mxfp4'\), for example"),
        (lambda x, w: Gemm("mxfp4", "bf16"), r"needs lhs to be an mxjax\.Operand.*write Operand\('mxfp4'\)"),
        (lambda x, w: Gemm(rotation=16), r"write Rotation\(16\)"),
        (lambda x, w: Policy("mxfp4"), r"write Gemm\(Operand\('mxfp4'\), Operand\('mxfp4'\)\)"),
        (lambda x, w: Policy(fprop=Operand()), r"needs fprop to be an mxjax\.Gemm"),
        (lambda x, w: Policy("fp8"), r"write Gemm\(Operand\('mxfp4'\).* get_policy\('fp8'\)\.fprop"),
        (lambda x, w: Policy([1]), r"needs fprop to be an mxjax\.Gemm, got \[1\]"),
        (lambda x, w: Operand(prescale="3/4"), r"Operand needs prescale to be a number, got '3/4'"),
    ],
)
def test_an_argument_of_the_wrong_type_says_what_to_write(call, message):
    x, w, _ = inputs()
    with types_unchecked(), pytest.raises(TypeError, match=message):
        call(x, w)


def sharded(stored, multiplied):
    """Returns a `dot` on a mesh of one device with this layout."""

    def product(x, w):
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("d",))):
            return mxjax.dot(x, w, policy="wgrad", layout=mxjax.Layout(stored, multiplied))

    return product


def bad_dot(**options):
    """Returns a call of `dot` with these options."""
    return lambda x, w: mxjax.dot(x, w, **{"policy": "wgrad"} | options)


BAD_CALLS = {
    "dtype": (TypeError, lambda x, w: mxjax.dot(x.astype(int), w, policy="wgrad"), r"\(x\) is int32"),
    "no array": (
        TypeError,
        lambda x, w: mxjax.dot([1.0], w, policy="wgrad"),
        "needs x to be an array, not list; pass jnp",
    ),
    "shape": (ValueError, lambda x, w: mxjax.dot(x, x, policy="wgrad"), r"got \(40, 48\) and \(40, 48\)"),
    **{
        f"no key for {policy}": (
            ValueError,
            bad_dot(policy=policy),
            f"draws random bits in {gemms} and needs key=",
        )
        for policy, gemms in (
            *(("wgrad_sr", "wgrad"), ("wgrad_rht", "wgrad")),
            *(("amazon", "dgrad, wgrad"), ("full_sr", "fprop, dgrad, wgrad")),
        )
    },
    "no JAX key": (TypeError, bad_dot(policy="wgrad_sr", key=0), r"JAX key, got 0; pass jax\.random\.key"),
    "policy": (ValueError, bad_dot(policy="wgrad_hadamar"), "did you mean"),
    "no policy": (TypeError, bad_dot(policy=3), r"policy must be an mxjax\.Policy"),
    "None for a policy": (TypeError, bad_dot(policy=None), r"policy must be an mxjax\.Policy"),
    "implementation": (
        ValueError,
        bad_dot(implementation="cuda"),
        r"unknown implementation 'cuda'.*reference, xla, fp8",
    ),
    "implementation that does not run here": (
        NotImplementedError,
        bad_dot(implementation="triton"),
        r"'triton' needs a GPU and Triton.*use 'xla'",
    ),
    "implementation of other formats": (
        NotImplementedError,
        bad_dot(policy="nvfp4", key=jax.random.key(0), implementation="scaled_dot"),
        r"takes MXFP4 in blocks of 32.*nvfp4.*use 'xla'",
    ),
    "result's dtype": (TypeError, bad_dot(preferred_element_type=int), "needs a floating-point preferred_el"),
    "no layout": (TypeError, bad_dot(layout=P()), r"needs layout to be an mxjax\.Layout or None"),
    "layout without a mesh": (ValueError, bad_dot(layout=mxjax.Layout(P(), P())), "but no mesh is set"),
    "layout of another mesh": (
        ValueError,
        sharded(P("fsdp"), P()),
        r"layout\.stored .*but the mesh has the axes",
    ),
    "layout of three axes": (
        ValueError,
        sharded(P(), P(None, None, "d")),
        r"layout\.multiplied to be a Part",
    ),
}


@pytest.mark.parametrize("transform", ["call", "jit", "grad", "jit of grad"])
@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_bad_call_says_what_to_write_in_a_traceback_of_at_most_three_frames_of_ours(case, transform):
    error, call, message = BAD_CALLS[case]
    transforms = {
        "call": lambda f: f,
        "jit": jax.jit,
        "grad": jax.grad,
        "jit of grad": lambda f: jax.jit(jax.grad(f)),
    }
    x, w, _ = inputs()
    with types_unchecked(), pytest.raises(error, match=message) as raised:
        transforms[transform](lambda x, w: call(x, w).sum())(x, w)
    ours = [frame.name for frame in traceback.extract_tb(raised.tb) if frame.filename.startswith(LIBRARY)]
    assert ours[0] == "dot"
    assert len(ours) <= 3, ours


@pytest.mark.parametrize(
    ("contract", "message"),
    [
        (((-1,), (0,)), r"axes counted from 0.*write lhs\.ndim - 1"),
        (((7,), (0,)), "axes counted from 0"),
        (((1, 1), (0, 1)), "each axis once"),
        (((1,), (0, 1)), "do not match"),
    ],
    ids=str,
)
def test_axes_that_are_not_there_once_raise(contract, message):
    x, w, _ = inputs()
    for product in (functools.partial(mxjax.dot_general, policy="bf16"), mxjax.make_dot_general("bf16")):
        with pytest.raises(ValueError, match=message):
            product(x, w, (contract, ((), ())))


@pytest.mark.parametrize(
    "forward",
    [
        lambda f, x: jax.jvp(f, (x,), (x,)),
        lambda f, x: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
        lambda f, x: jax.jacfwd(f)(x),
        lambda f, x: jax.linearize(f, x),
        lambda f, x: jax.linearize(jax.jit(f), x),
    ],
    ids=["jvp", "jit of jvp", "jacfwd", "linearize", "linearize of jit"],
)
def test_forward_mode_raises(forward):
    x, w, _ = inputs()
    with pytest.raises(TypeError, match=r"have no forward mode.*jax\.grad"):
        forward(lambda x: mxjax.dot(x, w, policy="wgrad"), x)
