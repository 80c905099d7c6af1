"""Implementations of a GEMM: each multiplies the same values, whatever it carries them in."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.dots import jitted_products, products
from support.marks import parametrize

import mxjax
from mxjax.numerics.operand import Operand
from mxjax.operands.carriers import SHIFTS, carry
from mxjax.operands.kernel_operand import KernelOperand, decode
from mxjax.operands.product import contract, contract_by_halves, contract_often_short
from mxjax.policy import Gemm, Policy
from mxjax.products import implementations
from mxjax.products import multiply as multiply_module
from mxjax.products.implementations import compiler_options, implementations_of
from mxjax.runtime.devices import Target, use_target
from mxjax.runtime.mesh import Layout

ON_PACKED = ["fp8_carriers", "scaled_dot"]


def tensors(m=40, k=96, n=72, dtype=jnp.bfloat16, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    x = jax.random.normal(keys[0], (m, k), dtype)
    w = 0.02 * jax.random.normal(keys[1], (k, n))
    return x, w, (1e-5 * jax.random.normal(keys[2], (m, n))).astype(dtype)


def all_three(x, w, dy, policy, implementation):
    """Returns y, dx and dw."""
    return jitted_products(x, w, dy, jax.random.key(7), policy=policy, implementation=implementation)


@pytest.mark.parametrize("implementation", ["xla", *ON_PACKED])
def test_blocks_with_the_smallest_scale_are_multiplied(implementation):
    """Its byte 0 is 2**-127, a subnormal; the elements of 2 and more are normal numbers."""
    x = np.outer([2.0, -3.0, 4.0, 6.0], np.ones(64)) * 2.0**-127
    x[0, 1::2] = 2.0**-40  # another element of the block, which keeps byte 0 from it
    x[0, :32] = 2.0**-126
    policy, w = Policy(), jnp.full((64, 32), 2.0**60)
    dot = functools.partial(mxjax.dot, jnp.float32(x), w, policy=policy)
    np.testing.assert_array_equal(dot(implementation=implementation), dot(implementation="reference"))
    np.testing.assert_array_equal(dot(implementation=implementation)[1:, 0], x[1:].sum(axis=1) * 2.0**60)


def distance(a, b):
    a, b = (np.asarray(t, np.float64) for t in (a, b))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@parametrize(
    "policy",
    "wgrad_hadamard",
    slow=["full_rht", "tetrajet", "fprop"],
    exhaustive=["wgrad", "full_hadamard", "lumen"],
)
def test_multiplies_the_values_of_the_reference(policy):
    args = tensors()
    expected = all_three(*args, policy, "reference")
    for implementation in ON_PACKED:
        for got, wanted in zip(all_three(*args, policy, implementation), expected, strict=True):
            assert got.dtype == wanted.dtype
            assert distance(got, wanted) < 1e-4


@pytest.mark.parametrize("implementation", ON_PACKED)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_scales_that_span_more_than_any_carrier_are_multiplied_right(implementation, which):
    args = list(tensors())
    span = jnp.exp2(jnp.round(jnp.linspace(-40, 0, args[which].shape[0])))[:, None]
    args[which] = (args[which].astype(jnp.float32) * span).astype(args[which].dtype)
    expected = all_three(*args, "wgrad_hadamard", "reference")
    for got, wanted in zip(all_three(*args, "wgrad_hadamard", implementation), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-2, atol=0)  # element by element: none is lost


jitted_carry = jax.jit(carry, static_argnums=1)


@pytest.mark.parametrize("carrier", ["e4m3", "e5m2"])
@pytest.mark.parametrize("beyond", [0, 1])
def test_a_carrier_holds_what_its_range_does_and_says_when_not(carrier, beyond):
    low, high = SHIFTS[carrier]
    scales = np.array([[130, 130 - (high - low) - beyond, 0]], np.uint8)
    codes = np.arange(96, dtype=np.uint8) % 16
    codes[64:] = 0  # an all-zero block, of scale byte 0, is no loss
    q = KernelOperand(jnp.asarray(codes[None, ::2] | codes[None, 1::2] << 4), jnp.asarray(scales))
    carried = jitted_carry(q, carrier)
    assert bool(carried.fits) == (beyond == 0)
    if not beyond:
        exponents = np.asarray(carried.unit, np.int32)[:, None] - 127
        values = np.ldexp(np.asarray(carried.elements, np.float32), exponents)
        np.testing.assert_array_equal(values, decode(q, jnp.float32))


@pytest.mark.parametrize("byte", [0, 1, 127, 253, 254])
def test_decodes_every_code_at_extreme_scales(byte):
    codes = jnp.arange(32, dtype=jnp.uint8) % 16
    q = KernelOperand((codes[::2] | codes[1::2] << 4)[None], jnp.array([[byte]], jnp.uint8))
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.where(np.arange(16) < 8, 1, -1) * np.tile(magnitudes, 2) * 2.0 ** (byte - 127)
    values = np.where(np.abs(values) < 2.0**-126, 0, values)  # XLA's CPU flushes subnormals
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(decode(q, jnp.float32)[0, :16], values.astype(np.float32))


@pytest.mark.parametrize("implementation", ON_PACKED)
@pytest.mark.parametrize(
    "operand",
    [
        Operand("nvfp4"),
        Operand("fp4_vector"),
        Operand(scale_rule="quest", block_shape=(32, 32)),
        Operand(split="mean"),
    ],
    ids=str,
)
def test_a_named_implementation_refuses_operands_that_it_does_not_take(operand, implementation):
    x, w, _ = tensors()
    with pytest.raises(NotImplementedError, match=f"'{implementation}' takes MXFP4 .*use 'xla'"):
        mxjax.dot(x, w, policy=Policy(Gemm(operand, Operand())), implementation=implementation)


def test_gemms_without_mxfp4_run_in_fp8_or_bfloat16():
    fprop = implementations_of(mxjax.get_policy("fprop"), "fp8_carriers")
    assert fprop == ("fp8_carriers", "fp8_tensor", "fp8_tensor")
    bf16 = implementations_of(mxjax.get_policy("bf16"), "fp8_carriers")
    assert bf16 == ("xla", "xla", "xla")
    both_e5m2 = Gemm(Operand("fp8_e5m2"), Operand("fp8_e5m2"))  # which no GPU multiplies
    with pytest.raises(NotImplementedError):
        implementations_of(Policy(both_e5m2, both_e5m2, both_e5m2), "fp8_carriers")


def test_the_cpu_keeps_conversions_and_a_gpu_without_kernels_has_no_options(monkeypatch):
    if implementations.current_target() is None:
        assert compiler_options([mxjax.get_policy("bf16")], None) == {"xla_allow_excess_precision": False}
    monkeypatch.setattr(implementations, "current_target", lambda: None)
    monkeypatch.setattr(implementations, "platform", lambda: "gpu")
    assert compiler_options([mxjax.get_policy("bf16")], None) == {}


def test_cuda_compiles_without_tritons_gemms_where_they_are_tuned_for_long():
    bf16, *others = (
        mxjax.get_policy(name) for name in ("bf16", "fp32", "fp8", "uniform4_fp32", "wgrad_hadamard")
    )
    with use_target(Target("cuda", "sm_90")):
        assert compiler_options([bf16], None) == {}
        for policy in others:
            assert compiler_options([bf16, policy], None) == {"xla_gpu_enable_triton_gemm": False}
    with use_target(Target("hip", "gfx950")):
        assert compiler_options([bf16, *others], None) == {}


@pytest.mark.parametrize("implementation", ON_PACKED)
def test_keeps_packed_operands_for_the_backward_pass(implementation):
    x, w, _ = tensors(m=64, k=128, n=256)

    def kept(policy, implementation):
        _, vjp = jax.vjp(lambda x, w: mxjax.dot(x, w, policy=policy, implementation=implementation), x, w)
        return sum(leaf.nbytes for leaf in jax.tree.leaves(vjp) if leaf.ndim > 1)

    packed = {"x": 17 * x.size // 32, "w": 17 * w.size // 32}
    assert kept("wgrad_hadamard", implementation) == sum(packed.values())
    assert kept("wgrad_hadamard", "xla") == x.nbytes + w.nbytes
    residuals = functools.partial(mxjax.stats.residual_bytes, x, w, policy="wgrad_hadamard")
    assert residuals(implementation=implementation) == packed
    assert residuals(implementation="xla") == {"x": x.nbytes, "w": w.nbytes}


@pytest.mark.parametrize(("lhs_axis", "rhs_axis"), [(-1, -2), (-2, -1), (-2, -2), (-1, -1)])
def test_a_product_by_halves_is_as_exact_as_one_in_float32(lhs_axis, rhs_axis):
    random = np.random.default_rng(0)

    def operand(axis):  # some 26 binades in a row, and rows that are 80 apart
        x = random.standard_normal((2, 40, 512)) * np.exp(3 * random.standard_normal((2, 40, 512)))
        x = np.float32(x * 2.0 ** random.integers(-40, 40, (2, 40, 1)))
        x[1, 0] = 0
        return jnp.asarray(x if axis == -1 else x.swapaxes(-1, -2))

    left, right = operand(lhs_axis), operand(rhs_axis)
    rows, columns = (
        np.float64(t if axis == -1 else t.swapaxes(-1, -2))
        for t, axis in ((left, lhs_axis), (right, rhs_axis))
    )
    exact = rows @ columns.swapaxes(-1, -2)
    size = np.linalg.norm(rows, axis=-1)[..., :, None] * np.linalg.norm(columns, axis=-1)[..., None, :]

    def error(product):
        y = jax.jit(lambda left, right: product(left, lhs_axis, right, rhs_axis))(left, right)
        return np.sqrt(np.mean(np.square((np.asarray(y, np.float64) - exact) / np.where(size, size, 1))))

    plain = functools.partial(contract, precision=jax.lax.Precision.HIGHEST)
    assert error(contract_by_halves) < 2 * error(plain) < 1e-7


def test_the_second_half_is_no_difference_of_conversions():
    """XLA drops a conversion to float16 and back on GPUs, not on CPUs, where this test runs."""
    x = jnp.ones((4, 32))
    jaxpr = jax.make_jaxpr(lambda x: contract_by_halves(x, -1, x, -1))(x)
    assert "reduce_precision" in str(jaxpr)
    back = [e for e in jaxpr.eqns if e.primitive.name == "convert_element_type"]
    assert {e.params["new_dtype"] for e in back} == {jnp.dtype(jnp.float16)}


def test_products_by_halves_span_the_range_of_float32():
    contract = jax.jit(lambda left, right: contract_by_halves(left, -1, right, -1))
    large, small = jnp.float32([[2.0**127, 2.0**95]]), jnp.float32([[0.0, 2.0**-125]])
    assert contract(large, small) == 2.0**-30
    assert contract(large, jnp.float32([[2.0**-120, 0]])) == 2.0**7
    np.testing.assert_array_equal(contract(jnp.zeros((2, 0)), jnp.zeros((3, 0))), np.zeros((2, 3)))
    assert np.isnan(contract(jnp.float32([[jnp.inf, 2.0**95]]), large))


@pytest.mark.parametrize(
    ("value", "lost"), [(2047, 0), (2049, 1), (jnp.nan, 1), (jnp.inf, 1), (1 + 2.0**-12, 1)]
)
def test_what_fits_eleven_bits_is_not_multiplied_again(value, lost, monkeypatch):
    monkeypatch.setattr("mxjax.operands.product.on_gpu", lambda: True)
    keys, runs = jax.random.split(jax.random.key(0)), []
    x, w = jax.random.randint(keys[0], (24, 64), -2047, 2048), jax.random.normal(keys[1], (64, 40))
    x = x.astype(jnp.float32).at[3, 5].set(value)

    def compute(x):
        jax.debug.callback(lambda: runs.append(1))
        return x / 1024

    y = jax.jit(lambda x: contract_often_short(compute, (x,), -1, w, -2))(x)
    jax.effects_barrier()
    assert len(runs) == 1 + lost
    wanted = contract_by_halves(x / 1024, -1, w, -2)
    np.testing.assert_allclose(y, wanted, rtol=1e-6, atol=1e-6 * float(jnp.abs(wanted[:3]).max()))


@parametrize("policy", "ms_fp4", slow=["uniform4_fp32", "tetrajet_v2"])
def test_gpus_multiply_float32_scales_by_halves(policy, monkeypatch):
    halves = mock.Mock(wraps=contract_by_halves)
    monkeypatch.setattr("mxjax.operands.product.contract_by_halves", halves)
    args, results = tensors(k=128, n=128), []
    for gpu in (False, True):
        monkeypatch.setattr("mxjax.operands.product.on_gpu", lambda gpu=gpu: gpu)
        with jax.numpy_rank_promotion("warn" if gpu else "raise"):  # a cache of its own: all is traced again
            results.append(all_three(*args, mxjax.get_policy(policy), "xla"))
        assert halves.called == gpu
    for expected, got in zip(*results, strict=True):
        assert distance(got, expected) < (1e-6 if got.dtype == jnp.float32 else 1e-3)


@pytest.mark.slow
def test_gemms_on_gpus_round_to_bfloat16_themselves(monkeypatch):
    """Where nothing is left to do with the sums: no other dtype, no factors, no sums over devices."""
    monkeypatch.setattr("mxjax.products.multiply.on_gpu", lambda: True)
    x, w, _ = tensors(24, 96, 40)  # a shape of its own, because traces are kept
    expected = contract(x, -1, w.astype(jnp.bfloat16), -2, None).astype(jnp.bfloat16)

    def dot(dtype, policy, layout=None, devices=1):
        monkeypatch.setattr("jax.device_count", lambda: devices)
        options = {"policy": policy, "key": jax.random.key(0), "implementation": "xla"}
        trace = jax.jit(
            functools.partial(mxjax.dot, layout=layout, preferred_element_type=dtype, **options)
        ).trace(x, w)
        jax.clear_caches()
        return trace, str(trace.jaxpr).count("preferred_element_type=bfloat16")

    trace, rounded = dot(jnp.bfloat16, "bf16")
    assert rounded == 1
    found = trace.lower().compile()(x, w)
    np.testing.assert_allclose(np.float32(found), np.float32(expected), rtol=2**-7)
    assert dot(jnp.bfloat16, "wgrad")[1] == 1
    assert dot(jnp.float32, "bf16")[1] == 0
    assert dot(jnp.bfloat16, "nvfp4")[1] == 0  # its tensors have factors
    assert dot(jnp.bfloat16, "bf16", devices=2)[1] == 0
    axes = (jax.sharding.AxisType.Auto,) * 2
    for tensor, whole in ((1, 1), (2, 0)):
        mesh = jax.sharding.AbstractMesh((2, tensor), ("fsdp", "tensor"), axes)
        layout = Layout(P("fsdp", "tensor"), P(None, "tensor"), whole_sums=tensor == 1)
        with jax.sharding.use_abstract_mesh(mesh):
            assert dot(jnp.bfloat16, "bf16", layout, 2)[1] == whole


@pytest.mark.slow
def test_operands_in_bfloat16_on_gpus_leave_their_factors_to_what_reads_a_product(monkeypatch):
    x, *_ = tensors()
    lhs, rhs = KernelOperand(x, None, None, jnp.float32(3e-3)), KernelOperand(x[:8], None, prescale=0.75)

    def multiply(dtype, precision=None):
        return multiply_module.multiply(lhs, rhs, "xla", dtype, precision, ("e4m3", "e4m3"))

    wanted = multiply(jnp.float32)
    assert wanted.factors is None
    monkeypatch.setattr(multiply_module, "on_gpu", lambda: True)
    product = multiply(jnp.bfloat16)
    assert product.raw.dtype == jnp.bfloat16
    np.testing.assert_allclose(product.value(jnp.float32), wanted.raw, rtol=2**-8)
    assert multiply(jnp.bfloat16, jax.lax.Precision.HIGHEST).factors is None


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_fp8_tensors_on_gpus_leave_their_scales_to_what_reads_a_product_in_bfloat16(monkeypatch, dtype):
    x = jax.random.normal(jax.random.key(0), (2, 32, 64), jnp.bfloat16)
    w = 0.02 * jax.random.normal(jax.random.key(1), (64, 48))
    dy = 1e-4 * jax.random.normal(jax.random.key(2), (2, 32, 48), dtype)

    options = {"policy": "fp8", "implementation": "fp8_carriers", "preferred_element_type": dtype}
    run = functools.partial(products, x, w, dy, **options)
    wanted = run()
    jax.clear_caches()  # of traces on a CPU
    monkeypatch.setattr(multiply_module, "on_gpu", lambda: True)
    text = str(jax.make_jaxpr(run)())
    wide = {jnp.bfloat16: 1, jnp.float32: 2}[dtype]  # Wgrad and maybe Fprop; dx has x's dtype
    assert text.count("preferred_element_type=bfloat16") == 3 - wide
    for a, b in zip(run(), wanted, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.linalg.norm(a - b) <= 3.2e-3 * np.linalg.norm(b)
        assert abs(np.vdot(a, b) / np.vdot(b, b) - 1) < 3e-4  # rounded scales would be 0.2 % off
    jax.clear_caches()
