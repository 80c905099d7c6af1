"""The cases of `bench_attention`: candidates of each kernel, whole attention by them, cuDNN's and XLA's."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mxjax.devices import current_target
from mxjax.kernels.attention import launches
from mxjax.kernels.attention.blocks import Blocks, Kernels, candidates
from mxjax.kernels.bench.timing import Timing, measure

REPEATS = 3  # runs that must have the same bits
LARGEST_ERROR = 0.02
PASSES = {"forward": 2, "key_gradients": 4, "query_gradients": 3, "forward and backward": 7}
"""Products of S by S by H that a pass takes for each head, half of which the mask removes."""


class Shape(NamedTuple):
    """q is [b, s, n, h]; k and v are [b, s, g, h]."""

    b: int
    s: int
    n: int
    g: int
    h: int

    @property
    def name(self) -> str:
        """The sizes as the command line takes them."""
        return "x".join(map(str, self))


class AttentionCase(NamedTuple):
    """A pass of attention, by "cudnn", "xla", or our kernels with these blocks."""

    shape: Shape
    which: str
    by: str | Blocks | Kernels

    @property
    def name(self) -> str:
        """The pass and how it runs."""
        if isinstance(self.by, Blocks):
            queries, keys, warps, stages = self.by
            return f"{self.which}, {queries} queries x {keys} keys, {warps} warps, {stages} stages"
        return f"{self.which}, {self.by if isinstance(self.by, str) else 'mxjax, fastest blocks'}"


def kernel_cases(shape: Shape, *, first: bool = False) -> Iterator[AttentionCase]:
    """Yields the candidates of each kernel, or the first of each."""
    for which, blocks in candidates(current_target(), shape.h)._asdict().items():
        for one in blocks[:1] if first else blocks:
            yield AttentionCase(shape, which, one)


def whole_cases(shape: Shape, fastest: Kernels) -> Iterator[AttentionCase]:
    """Yields the baselines and attention by one block of each kernel."""
    for which in ("forward", "forward and backward"):
        for by in ("cudnn", "xla", fastest):
            yield AttentionCase(shape, which, by)


def run_case(case: AttentionCase, rounds: int) -> tuple[Timing, float]:
    """Checks a case's results and times it; also returns its error.

    The error is the largest over rows of a head: the norm of the difference from the float32 reference over
    the sum of the row's norm and the mean norm. Fused backward passes take row products from the output that
    they returned, in bfloat16, which the reference then does too; XLA's does not and is timed whatever its
    error.

    Raises:
      AssertionError: the error is large, or another run has other bits.
    """
    tensors, wanted = _tensors(case.shape)
    run = _program(case)
    names = _RESULTS[case.which]
    results = run(*tensors)
    if case.which == "forward and backward" and case.by != "xla":
        wanted = wanted | _of_rounded(tensors, wanted, results[0])
    error = max(float(_distance(got, wanted[name])) for name, got in zip(names, results, strict=True))
    assert case.by == "xla" or error < LARGEST_ERROR, f"differs from the float32 reference by {error:.2g}"
    for _ in range(REPEATS - 1 if not isinstance(case.by, str) else 0):
        same = [bool(jnp.all(a == b)) for a, b in zip(run(*tensors), results, strict=True)]
        assert all(same), f"another run gives other bits of {names[same.index(False)]}"
    return measure(run, *tensors, rounds=rounds), error


_RESULTS = {
    "forward": ("out",),
    "key_gradients": ("dk", "dv"),
    "query_gradients": ("dq",),
    "forward and backward": ("out", "dq", "dk", "dv"),
}


def _program(case: AttentionCase) -> Callable[..., list[jax.Array]]:
    if isinstance(case.by, Blocks):
        return jax.jit(functools.partial(_one_kernel, case.which, case.by))
    if isinstance(case.by, Kernels):
        return jax.jit(functools.partial(_all_kernels, case.which, case.by))
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=case.by)
    return jax.jit(functools.partial(_by_gradient, case.which, attend))


def _one_kernel(which: str, blocks: Blocks, q, k, v, dout, lse, delta) -> list[jax.Array]:
    target = current_target()
    q, dout = _grouped(q, k), _grouped(dout, k)
    if which == "forward":
        return [_flat(launches.forward(q, k, v, target, blocks)[0])]
    if which == "key_gradients":
        return list(launches.key_gradients(q, k, v, dout, lse, delta, target, blocks))
    return [_flat(launches.query_gradients(q, k, v, dout, lse, delta, target, blocks))]


def _all_kernels(which: str, kernels: Kernels, q, k, v, dout, lse, delta) -> list[jax.Array]:
    del lse, delta
    target = current_target()
    q, dout = _grouped(q, k), _grouped(dout, k)
    out, lse = launches.forward(q, k, v, target, kernels.forward[0])
    if which == "forward":
        return [_flat(out)]
    delta = launches.row_products(out, dout)
    dk, dv = launches.key_gradients(q, k, v, dout, lse, delta, target, kernels.key_gradients[0])
    dq = launches.query_gradients(q, k, v, dout, lse, delta, target, kernels.query_gradients[0])
    return [_flat(out), _flat(dq), dk, dv]


def _by_gradient(which: str, attend: Callable[..., jax.Array], q, k, v, dout, *_) -> list[jax.Array]:
    if which == "forward":
        return [attend(q, k, v)]
    out, vjp = jax.vjp(attend, q, k, v)
    return [out, *vjp(dout)]


def _grouped(q: jax.Array, k: jax.Array) -> jax.Array:
    return q.reshape(*k.shape[:3], -1, k.shape[3])


def _flat(q: jax.Array) -> jax.Array:
    return q.reshape(*q.shape[:2], -1, q.shape[4])


@functools.lru_cache(1)
def _tensors(shape: Shape) -> tuple[list[jax.Array], dict[str, jax.Array]]:
    """Returns q, k, v, dout, lse and delta, and the float32 reference's results."""
    b, s, n, g, h = shape
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = ((b, s, n, h), (b, s, g, h), (b, s, g, h), (b, s, n, h))
    q, k, v, dout = (
        jax.random.normal(key, size, jnp.bfloat16) for key, size in zip(keys, sizes, strict=True)
    )
    wanted = _reference(q, k, v, dout)
    lse = wanted.pop("lse")
    delta = launches.row_products(_grouped(wanted["out"], k), _grouped(dout, k))
    return [q, k, v, dout, lse, delta], wanted


@jax.jit
def _reference(q, k, v, dout) -> dict[str, jax.Array]:
    """Returns attention, its gradients and lse in float32."""

    def one(q_SRH, k_SH, v_SH, dout_SRH):
        def attend(q_SRH, k_SH, v_SH):
            scores = _scores(q_SRH, k_SH)
            out = jnp.einsum("rst,th->srh", jax.nn.softmax(scores), v_SH, precision="highest")
            return out, jax.nn.logsumexp(scores, axis=-1)

        out, vjp, lse = jax.vjp(attend, q_SRH, k_SH, v_SH, has_aux=True)
        return out, *vjp(dout_SRH), lse

    out, dq, dk, dv, lse = _by_heads(one, _grouped(q, k), k, v, _grouped(dout, k))
    return {"out": _flat(out), "dq": _flat(dq), "dk": dk, "dv": dv, "lse": lse.swapaxes(1, 2)}


@jax.jit
def _of_rounded(tensors, wanted, out) -> dict[str, jax.Array]:
    """Returns dq and dk in float32 with row products that are taken from an output in bfloat16.

    The gradient of the scores is p * (dp - row product), so an error of a row's product scales its p. That
    changes the first rows most, whose few terms nearly cancel.
    """
    q, k, _, dout, *_ = tensors
    change = jnp.sum((wanted["out"] - out.astype(jnp.float32)) * dout.astype(jnp.float32), axis=-1)

    def one(q_SRH, k_SH, change_SR):
        of_scores = jax.nn.softmax(_scores(q_SRH, k_SH)) * change_SR.T[..., None] * q_SRH.shape[-1] ** -0.5
        dq = jnp.einsum("rst,th->srh", of_scores, k_SH, precision="highest")
        return dq, jnp.einsum("rst,srh->th", of_scores, q_SRH, precision="highest")

    dq, dk = _by_heads(one, _grouped(q, k), k, change.reshape(*k.shape[:3], -1))
    return {"dq": wanted["dq"] + _flat(dq), "dk": wanted["dk"] + dk}


def _scores(q_SRH: jax.Array, k_SH: jax.Array) -> jax.Array:
    scores = jnp.einsum("srh,th->rst", q_SRH, k_SH, precision="highest") * q_SRH.shape[-1] ** -0.5
    return jnp.where(jnp.tri(*scores.shape[1:], dtype=bool), scores, -jnp.inf)


def _by_heads(one: Callable[..., tuple[jax.Array, ...]], *tensors: jax.Array) -> tuple[jax.Array, ...]:
    """Calls a function in float32 for one sequence and key head after another, axes 0 and 2."""
    heads = [x.astype(jnp.float32).swapaxes(1, 2) for x in tensors]
    found = jax.lax.map(lambda rows: jax.lax.map(lambda row: one(*row), rows), tuple(heads))
    return tuple(x.swapaxes(1, 2) for x in found)


@jax.jit
def _distance(got: jax.Array, wanted: jax.Array) -> jax.Array:
    norms = jnp.linalg.norm(wanted, axis=-1)
    return jnp.max(jnp.linalg.norm(got.astype(jnp.float32) - wanted, axis=-1) / (norms + jnp.mean(norms)))


def flops(shape: Shape, which: str) -> float:
    """Returns the multiplications and additions that a pass needs, without those that the mask removes."""
    return PASSES[which] * shape.b * shape.n * shape.h * float(shape.s) ** 2


def record_of(case: AttentionCase, result: tuple[Timing, float] | None) -> dict[str, Any]:
    """Returns a case as JSON can hold it; times are in seconds."""
    record: dict[str, Any] = {"name": case.name, "shape": case.shape.name, "which": case.which}
    record["by"] = case.by if isinstance(case.by, str) else "mxjax"
    if isinstance(case.by, Blocks):
        record["blocks"] = list(case.by)
    elif isinstance(case.by, Kernels):
        record["blocks"] = [list(blocks[0]) for blocks in case.by]
    if result is not None:
        timing, error = result
        record |= {**timing._asdict(), "error": error, "flops": flops(case.shape, case.which)}
    return record
