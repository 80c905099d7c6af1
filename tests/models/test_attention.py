"""Attention in pieces against attention as a whole."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import causal as attention
from models.attention import partial as partial_attention
from models.attention.documents import first_keys
from models.block import split_heads
from mxjax.kernels.attention import fused as kernels
from mxjax.runtime.devices import INTERPRETER, Target, use_target


def whole(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("length", [17, 200])
def test_pieces_equal_the_whole(length, monkeypatch):
    monkeypatch.setattr(attention, "LONGEST_WHOLE", 16)
    monkeypatch.setattr(attention, "PIECE", 16)
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (2, length, 6, 8))
    k, v = (jax.random.normal(key, (2, length, 2, 8)) for key in keys[1:3])
    dy = jax.random.normal(keys[3], q.shape)

    def with_gradients(attend):
        y, vjp = jax.vjp(attend, q, k, v)
        return y, *vjp(dy)

    expected = jax.jit(lambda: with_gradients(whole))()
    found = jax.jit(lambda: with_gradients(attention.causal_attention))()
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_a_long_sequence_never_has_all_scores(masked):
    """Nor does a mask of documents exist whole."""
    shape, first = (
        jax.ShapeDtypeStruct((1, 8192, 4, 64), jnp.bfloat16),
        jax.ShapeDtypeStruct((1, 8192), jnp.int32),
    )

    def loss(q, k, v, first_key):
        attend = attention.causal_attention(q, k, v, first_key if masked else None)
        return jnp.sum(attend.astype(jnp.float32))

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape, shape, shape, first).compile()
    assert (
        compiled.memory_analysis().temp_size_in_bytes < 4 * 8192**2 * 4 / 2
    )  # half of the scores in float32


@pytest.mark.parametrize(
    ("target", "dtype", "head", "fused"),
    [
        (Target("hip", "gfx950"), jnp.bfloat16, 64, True),
        (Target("hip", "gfx950"), jnp.bfloat16, 128, True),
        (Target("hip", "gfx950"), jnp.float32, 64, False),
        (Target("hip", "gfx950"), jnp.bfloat16, 16, False),
        (Target("hip", "gfx942"), jnp.bfloat16, 64, False),
        (INTERPRETER, jnp.bfloat16, 64, False),
        (Target("cuda", "sm_90"), jnp.bfloat16, 64, False),
    ],
)
def test_gfx950_takes_the_fused_kernels_for_heads_that_they_support(target, dtype, head, fused, monkeypatch):
    taken = []
    monkeypatch.setattr(kernels, "fused_attention", lambda q, k, v, **_: taken.append(q.shape) or q)
    q = jax.ShapeDtypeStruct((1, 8, 2, head), dtype)
    with use_target(target):
        jax.eval_shape(attention.causal_attention, q, q, q)
    assert bool(taken) == fused


def test_a_program_for_rocm_calls_no_cudnn_wherever_it_is_lowered(monkeypatch):
    client = types.SimpleNamespace(platform_version="PJRT C API, CUDA 13")
    device = types.SimpleNamespace(platform="gpu", client=client)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert attention.on_cuda()
    with use_target(Target("hip", "gfx950")):
        assert not attention.on_cuda()


@pytest.mark.parametrize(("is_causal", "mask"), [(True, "CAUSAL"), (False, "NO_MASK")])
def test_cudnn_is_given_the_results_of_all_keys(monkeypatch, is_causal, mask):
    """The programs for CUDA of a part of the keys: JAX has no public function for the backward one."""
    monkeypatch.setattr(partial_attention._cudnn(), "check_cudnn_version", lambda: 91000)
    q, k = (jax.ShapeDtypeStruct((2, 64, n, 64), jnp.bfloat16) for n in (4, 2))
    row = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
    results = partial_attention.Results(q, row, q, row)

    def lowered(run, *arguments):
        run = jax.jit(functools.partial(run, is_causal=is_causal))
        found = run.trace(*arguments).lower(lowering_platforms=("cuda",))
        [call] = re.findall(r"custom_call @__cudnn.*", found.as_text())
        assert rf"\22mask_type\22: \22{mask}\22" in call
        types = re.search(r": \((.*)\) -> ", call)
        assert types is not None
        return call, re.findall(r"tensor<(\S+)>", types[1]), [tuple(x.shape) for x in found.out_info]

    call, types, shapes = lowered(partial_attention.attend_part_by_cudnn, q, k, k)
    assert "fmhaSoftmax(" in call
    queries, keys = "2x64x4x64xbf16", "2x64x2x64xbf16"
    assert types == [queries, keys, keys]
    assert shapes == [q.shape, row.shape]
    call, types, shapes = lowered(partial_attention.part_gradients_by_cudnn, q, k, k, results)
    assert "fmhaSoftmaxBackward(" in call
    assert types == [queries, keys, keys, "2x4x64xf32", queries, queries]
    assert shapes == [q.shape, k.shape, k.shape]


def plainly(q, k, v, window, sinks):
    """Softmax over the visible keys and the sink, in NumPy; one head a key/value head."""
    _, S, N, H = q.shape
    scores = np.einsum("bsnh,btnh->bnst", q, np.repeat(k, N // k.shape[2], 2)) / H**0.5
    distance = np.arange(S)[:, None] - np.arange(S)[None]
    scores = np.where((distance >= 0) & ((distance < window) | (window == 0)), scores, -np.inf)
    weights = np.exp(scores)
    weights /= weights.sum(-1, keepdims=True) + np.exp(sinks)[None, :, None, None]
    return np.einsum("bnst,btnh->bsnh", weights, np.repeat(v, N // k.shape[2], 2))


@pytest.mark.parametrize("longest", [64, 8], ids=["whole", "in pieces"])
@pytest.mark.parametrize("window", [0, 5])
def test_windows_and_sinks(monkeypatch, window, longest):
    monkeypatch.setattr(attention, "LONGEST_WHOLE", longest)
    monkeypatch.setattr(attention, "PIECE", 4)
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 23, n, 8)) for i, n in enumerate((4, 2, 2)))
    sinks = jax.random.normal(jax.random.key(3), 4)
    first = first_keys(jnp.zeros((1, 23), jnp.int32), jnp.int32(window))
    ours = attention.causal_attention(q, k, v, first, sinks)
    np.testing.assert_allclose(ours, plainly(*map(np.asarray, (q, k, v)), window, sinks), atol=1e-5)


@pytest.mark.parametrize("target", [Target("cuda", "sm_90"), Target("hip", "gfx950")])
def test_masks_and_sinks_take_the_fused_kernels(monkeypatch, target):
    taken = []
    monkeypatch.setattr(kernels, "fused_attention", lambda q, k, v, **given: taken.append(given) or q)
    q, first = (
        jax.ShapeDtypeStruct(*given) for given in (((2, 9, 2, 64), jnp.bfloat16), ((1, 9), jnp.int32))
    )
    sinks = jax.ShapeDtypeStruct((2,), jnp.float32)
    with use_target(target):
        jax.eval_shape(lambda q, f, s: attention.causal_attention(q, q, q, f, s), q, first, sinks)
        jax.eval_shape(lambda q, f: attention.causal_attention(q, q, q, f), q, first)
    assert taken[0]["sinks"].shape == (2,)
    assert taken[1]["first_key"].shape == (2, 9)  # whole, where all sequences share a window


@pytest.mark.parametrize("queries", [1, 3])
def test_the_gradient_of_split_heads_is_that_of_jax_s_split(queries):
    y_BSGUH = jax.random.normal(jax.random.key(0), (2, 5, 3, queries + 2, 4))
    expected, of_split = jax.vjp(lambda y: tuple(jnp.split(y, [queries, queries + 1], axis=3)), y_BSGUH)
    found, of_heads = jax.vjp(split_heads, y_BSGUH)
    gradients = tuple(jax.random.normal(jax.random.key(i), part.shape) for i, part in enumerate(expected))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    np.testing.assert_array_equal(of_heads(gradients)[0], of_split(gradients)[0])


@pytest.mark.parametrize("factor", [None, 1.25])
def test_gpus_rotate_queries_and_their_gradients_to_the_same_bits(factor, monkeypatch):
    x, dy = jax.random.normal(jax.random.key(0), (2, 2, 7, 3, 8), jnp.bfloat16)
    rope = attention.Rope(jax.random.normal(jax.random.key(1), (1, 7, 4)), factor)

    def rotated():  # without jit, so that XLA does not fuse products with sums
        y, vjp = jax.vjp(lambda x: attention.apply_rope(x, rope), x)
        return y, vjp(dy)[0]

    expected = rotated()
    monkeypatch.setattr(attention, "on_gpu", lambda: True)
    jax.tree.map(np.testing.assert_array_equal, rotated(), expected)
