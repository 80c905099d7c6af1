"""`mxjax.dot` with its kernels, against the reference without them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import dots
from support.dots import products
from support.gpu import HAS_GPU
from support.marks import parametrize

import mxjax
from mxjax import Gemm, Operand, Rotation
from mxjax.operands.use import OperandUse, dequantize_use
from mxjax.products import prepare
from mxjax.products.draws import uses_of
from mxjax.products.implementations import implementations_of
from mxjax.runtime.devices import current_target

pytestmark = pytest.mark.usefixtures("kernels_run")


def tensors(span: int = 0):
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (2, 20, 96), jnp.bfloat16).astype(jnp.float32)
    x = (x * jnp.exp2(jnp.round(jnp.linspace(-span, 0, 96)))[None, None]).astype(jnp.bfloat16)
    w = 0.02 * jax.random.normal(keys[1], (96, 72))
    return x, w, 1e-5 * jax.random.normal(keys[2], (2, 20, 72))


def all_three(policy, implementation, x, w, dy):
    return products(x, w, dy, jax.random.key(7), policy=policy, implementation=implementation)


assert_close = functools.partial(dots.assert_close, bound=2e-4)


@parametrize("policy", "wgrad_hadamard", slow=["primus_turbo"], exhaustive=["full_rht", "tetrajet"])
@pytest.mark.parametrize(("implementation", "span"), [("xla", 0), ("fp8_carriers", 40), ("triton", 40)])
def test_kernels_give_the_values_of_the_reference(policy, implementation, span):
    """Also of scales that span forty binades."""
    args = tensors(span)
    assert_close(all_three(policy, implementation, *args), all_three(policy, "reference", *args))


@parametrize(
    "rotation",
    Rotation(16, "redrawn", order="redrawn"),
    slow=[Rotation(16, "redrawn", kind="dct"), Rotation(1, order="fixed")],
    ids=str,
)
@parametrize("implementation", "xla", slow=["fp8_carriers"])
def test_kernels_quantize_what_xla_rotates(rotation, implementation):
    gemm = Gemm(rotation=rotation)
    policy = mxjax.Policy(Gemm(), gemm, gemm)
    args = tensors()
    assert_close(all_three(policy, implementation, *args), all_three(policy, "reference", *args))


@parametrize(
    ("operand", "rotation"),
    (Operand(scale_rule="rceil"), None),
    slow=[(Operand(block_shape=(32, 32), rounding="stochastic", prescale=0.75), Rotation(64, "redrawn"))],
)
def test_the_backward_pass_sees_by_the_kernel_what_the_definition_gives(operand, rotation):
    keys = jax.random.split(jax.random.key(3), 3)
    x = jax.random.normal(keys[0], (2, 34, 45)) * jnp.exp2(jnp.arange(-22.0, 23.0))[None, None]
    x = x.at[0, 0, 0].set(jnp.nan).at[0, 1, 1].set(2.0**-126).at[1].multiply(0.0)
    for axis in (-1, -2):
        fprop, _ = uses_of(Gemm(operand, operand, rotation), axis, axis, keys[1])
        use = OperandUse(axis, reads=fprop._replace(form="packed"))
        by_kernel = jax.jit(lambda x, use=use: prepare.as_read(x, use))(x)
        assert by_kernel.dtype == (jnp.float32 if operand.prescale else jnp.bfloat16)
        wanted = jax.jit(functools.partial(dequantize_use, use=fprop))(x)
        np.testing.assert_array_equal(np.asarray(by_kernel, np.float32), wanted)


@parametrize(
    "policy",
    "fprop_dgrad",
    "nvfp4",
    slow=["quartet2", "ms_fp4"],
    exhaustive=["tetrajet_v2", "averis", "chmiel_mx", "four_over_six", "quartet"],
)
def test_one_tensor_is_prepared_for_gemms_of_different_formats(policy):
    x, w, dy = tensors()
    # In bfloat16 x has ties, which two programs of a GPU may break differently: XLA divides inexactly there.
    args = jax.random.normal(jax.random.key(4), x.shape), w, dy
    assert_close(all_three(policy, "xla", *args), all_three(policy, "reference", *args))


@pytest.mark.parametrize("empty", ["x", "w"])
def test_without_tokens_or_outputs_the_products_are_empty_or_zero(empty):
    x, w, dy = tensors()
    x, w, dy = (x[:0], w, dy[:0]) if empty == "x" else (x, w[:, :0], dy[..., :0])
    y, dx, dw = all_three("fprop_dgrad", "xla", x, w, dy)
    assert (y.shape, dx.shape, dw.shape) == (dy.shape, x.shape, w.shape)
    assert not np.any(dx)
    assert not np.any(dw)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["fp8_carriers", "triton"])
def test_long_sums_are_within_their_bound_of_float64(implementation):
    """As long as Wgrad's at 8192 tokens: matrix units that sum in fewer bits than float32 fail.

    The interpreter sums by numpy, for which fewer do.
    """
    keys, length = jax.random.split(jax.random.key(1), 2), 8192 if HAS_GPU else 1024
    x, w = jax.random.normal(keys[0], (32, length)), jax.random.normal(keys[1], (length, 32))
    y = mxjax.dot(x, w, policy="fprop", implementation=implementation)
    lhs, rhs = (mxjax.dequantize(mxjax.quantize(t, axis=axis)) for t, axis in ((x, 1), (w, 0)))
    assert_close([y], [np.asarray(lhs, np.float64) @ np.asarray(rhs, np.float64)])


@pytest.mark.parametrize("implementation", ["fp8_carriers", "triton"])
def test_kernels_compose_under_jit_vmap_and_remat(implementation):
    x, w, dy = tensors()
    ws = jnp.stack([w, 2 * w])
    run = jax.checkpoint(functools.partial(all_three, "wgrad_sr", implementation))
    mapped = jax.jit(jax.vmap(lambda v: run(x, v, dy)))(ws)
    for i, v in enumerate(ws):
        assert_close([t[i] for t in mapped], all_three("wgrad_sr", "reference", x, v, dy))


def test_without_a_name_a_gpu_takes_its_fastest():
    fastest = implementations_of(mxjax.get_policy("wgrad"), None).fprop
    native = {"gfx950": "triton", "sm_100": "triton", "sm_90": "fp8_carriers", "software": "xla_by_kernel"}
    assert fastest == native[current_target().arch]
