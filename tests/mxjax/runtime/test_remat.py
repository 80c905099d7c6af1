"""Rematerialization: each mode keeps the documented bytes and computes the same numbers."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from support.llamas import layer_policies
from support.marks import parametrize

from models import decoder
from models.attention import causal as attention
from models.configs import DecoderConfig
from mxjax.operands.computed import swiglu
from mxjax.products import implementations
from mxjax.products.implementations import check_remat
from mxjax.recipes import get_policy
from mxjax.runtime.remat import recomputed
from training.memory import kept_bytes

SMALL = DecoderConfig(64, 64, 2, 4, 2, 16, 96)
BATCH, LENGTH = 2, 32
TOKENS = BATCH * LENGTH


@pytest.fixture(scope="module")
def params():
    return decoder.init(SMALL, jax.random.key(0))


def loss_of(policy, implementation, mode, rules=()):
    policies = layer_policies(SMALL, policy, rules)
    return functools.partial(
        decoder.mean_loss, SMALL, policies=policies, implementation=implementation, remat=mode
    )


def kept(params, policy, implementation, mode):
    """Bytes that the blocks keep besides their input, of each block."""
    shape = (BATCH, LENGTH + 1)
    of_mode, of_full = (kept_bytes(loss_of(policy, implementation, m), params, shape) for m in (mode, "full"))
    return (of_mode - of_full) / SMALL.n_layers


@parametrize(
    ("policy", "rules", "modes"),
    slow=[("bf16", (("*.mlp.down", "full_sr"),), ("dots", "fp4", "full"))],
    exhaustive=[
        ("bf16", (), ("dots", "full")),
        ("wgrad_hadamard", (), ("dots", "fp4", "full")),
        ("full_sr", (), ("dots", "fp4", "full")),
    ],
)
def test_every_mode_computes_the_same_numbers(params, policy, rules, modes):
    """With one key: so what is computed again draws the random bits that it drew before.

    The losses are equal; gradients differ by how XLA fuses, and so rounds, what is computed again.
    """
    batch = jax.random.randint(jax.random.key(1), (BATCH, LENGTH + 1), 0, SMALL.vocab_size)

    def run(mode):
        def loss(params, key):
            return loss_of(policy, "fp8_carriers", mode, rules)(params, batch, key=key)

        return jax.jit(jax.value_and_grad(loss))(params, jax.random.key(2))

    expected = run("none")
    for mode in modes:
        loss, grads = run(mode)
        assert loss == expected[0]
        for found, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(expected[1]), strict=True):
            assert jnp.linalg.norm(found - wanted) < 0.05 * jnp.linalg.norm(wanted)


def operands(c):
    """Bytes of a block's packed operands: for Wgrad and Dgrad, and of all but the last product for Fprop."""
    heads = c.n_heads * c.head_dim
    weights = c.d_model * (c.qkv_size + heads + 3 * c.d_ff)
    activations = TOKENS * (4 * c.d_model + 2 * heads + c.d_ff)
    return (activations + 2 * weights - c.d_model * c.d_ff) * 17 / 32


def results(c):
    """Bytes of what a block's products, but the last, and attention give."""
    return 2 * TOKENS * (c.qkv_size + c.n_heads * c.head_dim + c.d_model + 2 * c.d_ff)


def test_fp4_keeps_the_packed_operands_alone(params):
    found = kept(params, "wgrad_hadamard", "fp8_carriers", "fp4")
    assert found == pytest.approx(operands(SMALL), rel=1e-3)  # but for the layer's number


def test_dots_keeps_the_results_of_products_and_attention(params):
    assert kept(params, "bf16", "xla", "dots") == pytest.approx(results(SMALL), rel=1e-3)


@pytest.mark.slow
def test_fp4_quantizes_nothing_again(params):
    """Packing shifts codes by four bits: counted in the whole gradient."""

    def packed(mode):
        def loss(params):
            batch = jnp.zeros((BATCH, LENGTH + 1), jnp.int32)
            return loss_of("wgrad_hadamard", "fp8_carriers", mode)(params, batch)

        return len(re.findall(r":u8\[[\d,]+\] = shift_left", str(jax.make_jaxpr(jax.grad(loss))(params))))

    assert packed("fp4") == packed("none") > 0
    assert packed("full") > packed("none")


@pytest.mark.parametrize(
    ("policy", "implementation"), [("bf16", "fp8_carriers"), ("wgrad", "xla"), ("wgrad", None)]
)
def test_fp4_without_packed_operands_is_refused(policy, implementation):
    with pytest.raises(ValueError, match=r"implementation 'fp8_carriers' \(anywhere\) or 'triton'"):
        check_remat("fp4", [get_policy(policy)], implementation)
    check_remat("dots", [get_policy(policy)], implementation)
    check_remat("fp4", [get_policy("bf16"), get_policy("wgrad")], "fp8_carriers")


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(implementations, "_fastest", lambda target: "fp8_carriers")


@pytest.fixture
def reading():
    """A policy whose backward GEMMs take packed operands, but whose estimates of gradients read x and w."""
    fprop = get_policy("ms_fp4").fprop  # which XLA quantizes
    lhs = dataclasses.replace(fprop.lhs, gradient=fprop.rhs.gradient)
    return dataclasses.replace(get_policy("quartet"), fprop=dataclasses.replace(fprop, lhs=lhs))


@pytest.mark.usefixtures("on_hopper")
def test_fp4_is_refused_where_the_gradient_reads_the_tensors(reading):
    assert implementations.implementations_of(reading, None) == ("xla", "fp8_carriers", "fp8_carriers")
    with pytest.raises(ValueError, match="would keep no operands: these policies' gradients read x and w"):
        check_remat("fp4", [reading], None)
    check_remat("fp4", [reading, get_policy("amazon")], None)


@pytest.mark.slow
@pytest.mark.usefixtures("on_hopper")
def test_such_a_policy_would_keep_attentions_result_alone(params, reading):
    assert kept(params, reading, None, "fp4") == 2 * TOKENS * SMALL.n_heads * SMALL.head_dim


def test_cudnn_s_attention_is_kept_with_its_statistics(params, monkeypatch):
    """Traced only: it is known by the name of JAX's primitive, which this holds to."""
    for check in ("check_cudnn_version", "check_compute_capability"):
        monkeypatch.setattr(fused_attention_stablehlo, check, lambda *_: 91_000)
    monkeypatch.setattr(attention, "on_cuda", lambda: True)
    result = 2 * TOKENS * SMALL.n_heads * SMALL.head_dim
    statistics = 4 * TOKENS * SMALL.n_heads
    for mode, implementation in (("dots", "xla"), ("fp4", "fp8_carriers")):
        plain = results(SMALL) if mode == "dots" else operands(SMALL)
        found = kept(params, "wgrad_hadamard", implementation, mode)
        assert found == pytest.approx(plain + (mode == "fp4") * result + statistics, rel=1e-3)


def test_only_the_argument_of_what_is_recomputed_is_kept():
    """A barrier hides it from XLA, which would find the common subexpressions and keep them."""
    x, dy = (jax.random.normal(jax.random.key(i), (4, 64), jnp.bfloat16) for i in range(2))
    y, vjp = jax.vjp(recomputed(swiglu), x)
    assert [t.shape for t in jax.tree.leaves(vjp)] == [x.shape]
    wanted, plain = jax.vjp(swiglu, x)
    np.testing.assert_array_equal(y, wanted)
    np.testing.assert_array_equal(vjp(dy[:, :32])[0], plain(dy[:, :32])[0])
    lowered = jax.jit(lambda x, dy: jax.vjp(recomputed(swiglu), x)[1](dy)).lower(x, dy[:, :32])
    assert lowered.as_text().count("optimization_barrier") == 1
