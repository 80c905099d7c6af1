"""Fused causal attention: its kernels against XLA's attention in float32, and the calls of AMD's library."""

import functools
import importlib
import itertools
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.dots import assert_close
from support.gpu import HAS_GPU
from support.marks import parametrize

from models.attention import partial
from models.attention.documents import first_keys
from models.attention.partial import Results, attend_part, attend_part_by_kernel, part_gradients
from mxjax.kernels.attention import aiter, fused
from mxjax.kernels.attention.blocks import TABLE
from mxjax.kernels.attention.fused import fused_attention
from mxjax.runtime.devices import INTERPRETER, Target, use_target
from mxjax.runtime.remat import rematerialize

GFX950 = Target("hip", "gfx950")


def draw(b, s, n, g, h):
    """Draws q, k, v and the gradient of the result."""
    rng = np.random.default_rng(0)
    shapes = ((b, s, n, h), (b, s, g, h), (b, s, g, h), (b, s, n, h))
    return [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]


def with_gradients(attend, q, k, v, dy):
    y, vjp = jax.vjp(attend, q, k, v)
    return y, *vjp(dy)


def reference(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


@parametrize(
    "shape",
    (1, 40, 2, 1, 64),  # a masked tail, two heads of queries for one of keys
    slow=[(2, 75, 4, 2, 64), (2, 64, 2, 2, 128), (1, 1, 3, 1, 64)],
)
def test_equals_float32_within_the_rounding_of_bfloat16(shape):
    arrays = draw(*shape)
    wide = [x.astype(jnp.float32) for x in arrays]
    with jax.default_matmul_precision("highest"):
        wanted = jax.jit(lambda *a: with_gradients(reference, *a))(*wide)
    found = jax.jit(lambda *a: with_gradients(fused_attention, *a))(*arrays)
    for name, got, exact in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        assert got.dtype == jnp.bfloat16
        difference = np.asarray(got, np.float32) - exact
        # With one key the gradient of q is the difference of two equal sums, taken in different orders.
        rounding = 2**-22 * np.linalg.norm(wide[3])
        assert np.linalg.norm(difference) <= 2**-8 * np.linalg.norm(exact) + rounding, name
        assert np.abs(difference).max() <= 2**-7 * np.abs(exact).max() + rounding, name


STARTS = np.zeros((2, 150), bool)
STARTS[0, [3, 64, 65, 131]] = STARTS[1, [0, 40]] = True


@parametrize(
    ("documents", "window", "with_sinks"), (True, 0, False), (False, 40, True), slow=[(True, 33, True)]
)
def test_documents_windows_and_sinks_equal_masked_scores(documents, window, with_sinks):
    """In float32, by a mask of all scores and a column of sinks, as transformers' gpt-oss computes it."""
    q, k, v, dy = draw(2, 150, 4, 2, 64)
    sinks = jnp.array([0.5, -1.0, 2.0, 0.0]) if with_sinks else None
    document = np.cumsum(STARTS & documents, axis=1)
    distance = np.arange(150)[:, None] - np.arange(150)
    sees = (document[:, :, None] == document[:, None]) & (distance >= 0) & (distance < (window or 150))

    def masked(q, k, v, sinks):
        scores = jnp.einsum("bsgrh,btgh->bgrst", q.reshape(2, 150, 2, 2, 64), k) / 8
        scores = jnp.where(sees[:, None, None], scores, -jnp.inf)
        if sinks is not None:
            column = jnp.broadcast_to(sinks.reshape(1, 2, 2, 1, 1), (*scores.shape[:4], 1))
            scores = jnp.concatenate([scores, column], axis=-1)
        weights = jax.nn.softmax(scores)[..., :150]
        return jnp.einsum("bgrst,btgh->bsgrh", weights, v).reshape(q.shape)

    def by_kernels(q, k, v, sinks):
        starts = np.maximum.accumulate(np.where(STARTS & documents, np.arange(150), 0), axis=1)
        first_key = first_keys(jnp.asarray(starts, jnp.int32), window)
        return fused_attention(q, k, v, first_key=first_key, sinks=sinks)

    def run(attend, *arrays):
        y, vjp = jax.vjp(attend, *arrays, sinks)
        return y, *jax.tree.leaves(vjp(dy.astype(y.dtype)))

    with jax.default_matmul_precision("highest"):
        wanted = jax.jit(lambda *a: run(masked, *a))(*(x.astype(jnp.float32) for x in (q, k, v)))
    found = jax.jit(lambda *a: run(by_kernels, *a))(q, k, v)
    assert_close(found, wanted, 2**-7)


@parametrize("is_causal", False, slow=[True])
def test_a_part_of_the_keys_equals_xla(is_causal):
    """Results to be merged: sums of exp(scores) are returned, and the gradients take those over all keys."""
    q, k, v, dout = draw(2, 128, 2, 1, 64)
    row = np.arange(128)
    seen = row // 2 if is_causal else np.where(row < 40, 3, np.where(row < 100, 70, 128))  # the last see none
    low = jnp.asarray(np.stack([seen, 0 * row]), jnp.int32)
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    _, lse = wanted = attend_part(*wide, low, is_causal=is_causal)
    found = attend_part_by_kernel(None, q, k, v, low, None, is_causal)
    statistics = jnp.where(jnp.isinf(lse), 1.0, lse + 0.5), dout, jnp.ones_like(lse)
    wanted += part_gradients(*wide, low, Results(q, *statistics), is_causal=is_causal)
    found += partial.part_gradients_by_kernel(None, q, k, v, low, *statistics, is_causal)
    for got, exact in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.isinf(got), np.isinf(exact))
        assert_close(*([np.where(np.isinf(x), 0, x)] for x in (got, exact)), 2**-7)


def test_gradients_across_documents_are_zero():
    q, k, v, dy = draw(1, 96, 1, 1, 64)
    first_key = jnp.where(jnp.arange(96) >= 50, 50, 0)[None]
    of_second = dy.at[:, :50].set(0)
    _, dq, dk, dv = with_gradients(lambda *a: fused_attention(*a, first_key=first_key), q, k, v, of_second)
    assert not any(np.asarray(x[:, :50], np.float32).any() for x in (dq, dk, dv))
    assert all(np.asarray(x[:, 50:], np.float32).any() for x in (dq, dk, dv))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the other sequence
def test_what_lies_after_a_sequence_is_not_read():
    """Its length is a multiple of a block of keys, and not of a block of queries."""
    q, k, v, dy = draw(2, 96, 2, 1, 64)
    attend = jax.jit(lambda *a: with_gradients(fused_attention, *a))
    wanted = attend(q, k, v, dy)
    found = attend(q, k.at[1].set(jnp.nan), v.at[1].set(jnp.nan), dy)
    for got, like in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(got[0], like[0])


@pytest.mark.slow
def test_vmap_enlarges_the_batch():
    arrays = draw(2, 33, 2, 1, 64)
    wanted = jax.jit(lambda *a: with_gradients(fused_attention, *a))(*arrays)
    q, k, v, dy = arrays
    one = lambda q, v, dy: with_gradients(fused_attention, q, k[:1], v, dy)  # noqa: E731
    parts = [x[:, None] for x in (q, v, dy)]
    found = jax.jit(jax.vmap(one))(*parts)
    np.testing.assert_array_equal(found[0][0, 0], wanted[0][0])
    np.testing.assert_array_equal(found[3][0, 0], wanted[3][0])


@pytest.mark.parametrize(("mode", "kernels"), [("dots", 3), ("full", 4)])
def test_remat_dots_keeps_what_the_backward_pass_reads(mode, kernels):
    """One kernel forward and two backward; `full` runs the first again."""
    q, k, v, _ = draw(1, 32, 2, 1, 64)

    def loss(q, k, v):
        attend = rematerialize(lambda q, k, v: fused_attention(q, k, v), mode, in_loop=False)
        return jnp.sum(attend(q, k, v).astype(jnp.float32))

    program = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(q, k, v).as_text()
    assert len(re.findall(r"custom_call @(?:xla\w*callback|triton_kernel_call_ffi)", program)) == kernels


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[..., :32], k[..., :32], v[..., :32]), r"equal heads of 64 or 128"),
        (lambda q, k, v: (q[:, :, :3], k, v), r"N a multiple of G, got q bfloat16\[1, 8, 3, 64\]"),
        (lambda q, k, v: (q, k[:, :4], v[:, :4]), r"needs q \[B, S, N, H\] and k, v \[B, S, G, H\]"),
        (lambda q, k, v: (q.astype(jnp.float32), k, v), r"needs bfloat16, got q float32.*; cast them"),
    ],
)
def test_what_it_cannot_take_is_one_line(change, message):
    with pytest.raises(ValueError, match=message) as error:
        fused_attention(*change(*draw(1, 8, 4, 2, 64)[:3]))
    assert "\n" not in str(error.value)


def test_without_tokens_the_result_is_empty():
    q, k, v, _ = draw(2, 0, 4, 2, 64)
    assert fused_attention(q, k, v).shape == (2, 0, 4, 64)


def test_blocks_divide_each_other():
    for kernels in TABLE.values():
        assert all(b.queries % b.keys == 0 for b in (*kernels.forward, *kernels.query_gradients))
        assert all(b.keys % b.queries == 0 for b in kernels.key_gradients)


@pytest.fixture(params=["JAX", "jax-aiter"])
def with_aiter(request, monkeypatch):
    """Puts a stand-in for JAX's module of AITER or for jax-aiter; returns the names of the custom calls."""
    registered = []
    module = types.SimpleNamespace(flash_attn_func=object() if request.param == "JAX" else None)
    monkeypatch.setitem(sys.modules, "jax._src.aiter", module)
    if request.param == "jax-aiter":
        registry = types.SimpleNamespace(register_ffi_target=lambda *of: registered.append(of))
        for name in ("jax_aiter", "jax_aiter.ffi"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, "jax_aiter.ffi.registry", registry)
    aiter._registered.cache_clear()
    fused._differentiable.cache_clear()  # which JAX has traced with the other's calls
    assert aiter.is_available(GFX950)
    yield (
        ("hip_mha_fwd_ffi", "hip_mha_bwd_ffi") if request.param == "JAX" else [name for name, _ in registered]
    )
    assert {platform for _, platform in registered} <= {"ROCM"}
    aiter._registered.cache_clear()


def rocm_program(b, s, n, g, h):
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in draw(b, s, n, g, h)]
    with use_target(GFX950):
        traced = jax.jit(lambda *a: with_gradients(fused_attention, *a)).trace(*arrays)
        return traced.lower(lowering_platforms=("rocm",)).as_text()


COMMON = {
    "dropout_p": "0.000000e+00 : f32",
    "softmax_scale": "1.250000e-01 : f32",
    "is_causal": "true",
    "window_size_left": "-1 : i32",
    "window_size_right": "-1 : i32",
    "use_asm_v3": "true",
    "how_v3_bf16_cvt": "0 : i32",
    "max_seqlen_q_attr": "-1 : i32",
    "max_seqlen_k_attr": "-1 : i32",
    "zero_tensors": "false",
}
OF_FORWARD = {
    "return_softmax_lse": "true",
    "return_dropout_randval": "false",
    "min_seqlen_q": "0 : i32",
    "logits_soft_cap": "0.000000e+00 : f32",
}
OF_BACKWARD = {"deterministic": "false", "is_v3_atomic_fp32": "false", "use_asm_v3": "false"}


def test_aiter_is_called_as_its_handlers_read_it(with_aiter):
    """Arguments in order, with empty arrays for those not given, and every attribute with its type.

    Source: the handlers' bindings in ROCm/jax, jaxlib/gpu/hip_aiter_mha_{fwd,bwd}.cc, and in ROCm/jax-aiter.
    """
    program = rocm_program(2, 10, 4, 2, 64)
    forward, backward = re.findall(r"custom_call @(\w*mha\w*)\(.*?\) \{(.*)\} : (\(.*)", program, re.I)
    q, k, rows, none = "tensor<2x10x4x64xbf16>", "tensor<2x10x2x64xbf16>", "tensor<2x4x10xf32>", "tensor<0x"
    arguments = [q, k, k, f"{none}i32>", f"{none}i32>", f"{none}bf16>", f"{none}bf16>"]
    arguments += [f"{none}f32>", f"{none}ui32>"]
    assert [forward[0], backward[0]] == list(with_aiter)
    assert forward[2].startswith(f"({', '.join(arguments)}) -> ({q}, {rows}, tensor<0xui8>, tensor<4xui32>)")
    arguments = [q, q, k, k, q, rows, f"{none}i32>", f"{none}i32>", *[f"{none}bf16>"] * 4]
    arguments += [f"{none}f32>", *[f"{none}ui32>"] * 2]
    assert backward[2].startswith(f"({', '.join(arguments)}) -> ({q}, {k}, {k}, {rows}, tensor<0xbf16>)")
    assert attributes(forward[1]) == COMMON | OF_FORWARD
    assert attributes(backward[1]) == COMMON | OF_BACKWARD


def attributes(text):
    [config] = re.findall(r"mhlo\.backend_config = \{(.*?)\}", text)
    return dict(part.split(" = ") for part in config.split(", "))


def in_documents(starts, *arrays):
    """Yields each head and document, as a slice of the tokens, with their parts of the arrays."""
    n, g = arrays[0].shape[1], arrays[1].shape[1]
    for begin, end in itertools.pairwise(starts):
        for head in range(n):
            of_head = [head if x.shape[1] == n else head * g // n for x in arrays]
            at = slice(begin, end)
            yield head, at, [x[at, i].astype(np.float32) for x, i in zip(arrays, of_head, strict=True)]


def mha_forward(q, k, v, starts, starts_of_keys, *_):
    """Computes documents as AITER's group mode does, from the starts of q and of k."""
    assert (q.ndim, starts[-1]) == (3, len(q))
    np.testing.assert_array_equal(starts, starts_of_keys)
    out, lse = np.zeros(q.shape, q.dtype), np.full((q.shape[1], len(q)), np.nan, np.float32)
    for head, at, (qh, kh, vh) in in_documents(starts, q, k, v):
        scores = np.where(np.tri(len(qh), dtype=bool), qh @ kh.T / 8, -np.inf)
        lse[head, at] = np.log(np.exp(scores).sum(1))
        out[at, head] = np.exp(scores - lse[head, at, None]) @ vh
    return out, lse, np.zeros(0, np.uint8), np.zeros(4, np.uint32)


def mha_backward(dout, q, k, v, out, lse, starts, starts_of_keys, *_):
    assert dout.shape == q.shape
    np.testing.assert_array_equal(starts, starts_of_keys)
    dq, dk, dv = (np.zeros(x.shape, np.float32) for x in (q, k, v))
    for head, at, (qh, kh, vh, oh, doh) in in_documents(starts, q, k, v, out, dout):
        of_keys = head * k.shape[1] // q.shape[1]
        weights = np.tril(np.exp(qh @ kh.T / 8 - lse[head, at, None]))
        d_scores = weights * (doh @ vh.T - (oh * doh).sum(1)[:, None]) / 8
        dq[at, head] = d_scores @ kh
        dk[at, of_keys] += d_scores.T @ qh
        dv[at, of_keys] += weights.T @ doh
    return *(x.astype(q.dtype) for x in (dq, dk, dv)), 0 * lse, np.zeros(0, q.dtype)


BEGINS = {
    "documents": [[0, 5, 20], [0, 39]],
    "too many": [[0, 5, 20, 21], [0, 7, 39]],
    "windows": [[0, 5], [0]],
}


@pytest.mark.skipif(HAS_GPU, reason="traces for gfx950 and runs, which the interpreter can")
@pytest.mark.parametrize(
    ("with_aiter", "case"),
    [("JAX", "documents"), ("jax-aiter", "documents"), ("JAX", "too many"), ("JAX", "windows")],
    indirect=["with_aiter"],
)
def test_aiter_computes_documents_if_the_mask_has_no_more(monkeypatch, with_aiter, case):
    """By a stand-in that checks shapes and attributes; else the Triton kernels compute them."""
    monkeypatch.setattr(aiter, "DOCUMENT", 16)  # of which two sequences of 40 tokens have six at most
    ran = []

    def ffi_call(name, results):
        is_forward = name == with_aiter[0]
        wanted = COMMON | (OF_FORWARD if is_forward else OF_BACKWARD) | {"use_asm_v3": "false"}
        wanted |= dict.fromkeys(("max_seqlen_q_attr", "max_seqlen_k_attr"), "40 : i32")

        def run(*arrays):
            ran.append(name)
            return (mha_forward if is_forward else mha_backward)(*map(np.asarray, arrays))

        def call(*arrays, **given):
            assert {key: as_text(value) for key, value in given.items()} == wanted
            return jax.pure_callback(run, results, *arrays)

        return call

    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)
    starts = np.zeros((2, 40), np.int32)
    for row, begins in zip(starts, BEGINS[case], strict=True):
        row[begins] = begins
    first_key = first_keys(
        jnp.asarray(np.maximum.accumulate(starts, axis=1)), 9 if case == "windows" else None
    )
    seen = (np.arange(40) >= np.asarray(first_key)[..., None]) & np.tri(40, dtype=bool)
    *arrays, dy = draw(2, 40, 4, 2, 64)
    masked = functools.partial(jax.nn.dot_product_attention, mask=seen[:, None], implementation="xla")
    with jax.default_matmul_precision("highest"):
        wide = [x.astype(jnp.float32) for x in (*arrays, dy)]
        wanted = jax.jit(lambda *a: with_gradients(masked, *a))(*wide)
    with use_target(GFX950):
        attend = functools.partial(fused_attention, first_key=first_key)
        found = jax.jit(lambda *a: with_gradients(attend, *a))(*arrays, dy)
    assert_close(found, wanted, 2**-7)
    assert ran == (list(with_aiter) if case == "documents" else [])


def as_text(value):
    """Returns an attribute as a program has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return (
        f"{value:e} : f32"
        if isinstance(value, np.float32)
        else f"{value} : {np.dtype(type(value)).str[1:2]}32"
    )


@pytest.mark.usefixtures("with_aiter")
def test_aiter_is_not_for_sinks_other_devices_and_a_deterministic_xla(monkeypatch):
    assert not aiter.is_available(GFX950, with_sinks=True)
    assert not aiter.is_available(Target("cuda", "sm_90"))
    assert not aiter.is_available(INTERPRETER)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=4 --xla_gpu_deterministic_ops=true")
    assert not aiter.is_available(GFX950)


def test_aiter_is_absent_where_jax_or_its_libraries_lack_it(monkeypatch):
    aiter._registered.cache_clear()
    monkeypatch.setitem(sys.modules, "jax._src.aiter", types.SimpleNamespace(flash_attn_func=None))
    assert not aiter.is_available(GFX950)
    aiter._registered.cache_clear()
    monkeypatch.delitem(sys.modules, "jax._src.aiter")
    if importlib.util.find_spec("jax._src.aiter") is None:
        assert not aiter.is_available(GFX950)
    aiter._registered.cache_clear()
