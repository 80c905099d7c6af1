"""Time of fused causal attention with every candidate block, beside cuDNN's and XLA's.

    python -m benchmarks.kernels.attention [--shapes 2x8192x32x8x128 …] [--first] [--out FILE]

A shape is BxSxNxGxH: q is [B, S, N, H], k and v are [B, S, G, H]. Results are compared with a float32
reference, and runs of ours with each other, before they are timed. "error" is the largest over rows of a
head: the norm of the difference over the sum of the row's norm and the mean norm. First each kernel runs
alone with all of its candidates, or with `--first` with the one in use, then whole attention with the fastest
of each; at last masked by documents, whose lengths follow Zipf's law with a mean of 1,000 tokens, and by
windows of a half and a quarter of the sequence, with `--peers` beside PyTorch's. The rate counts 2 products
forward, 5 backward, masked or not; a backward kernel alone counts its own, 4 and 3. The ceiling is cuDNN's
speed. Prints three tables a shape, and JSON as the last line. `--page docs/attention.md` measures nothing; it
writes what runs where.
"""

import argparse
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels import peers
from models.attention.causal import kernel_on
from models.attention.documents import first_keys
from mxjax.kernels.attention import aiter, launches
from mxjax.kernels.attention.blocks import HEAD_SIZES, Blocks, Kernels, candidates
from mxjax.kernels.selftest.measured import Case, Checked, Report, add_arguments, time_cases
from mxjax.runtime.devices import Target, current_target
from mxjax.runtime.tables import insert, table

REPEATS = 3  # runs that must have the same bits
LARGEST_ERROR = 0.02
MEAN_DOCUMENT = 1000  # tokens
PASSES = {"forward": 2, "key_gradients": 4, "query_gradients": 3, "forward and backward": 7}
"""Products of S by S by H that a pass takes for each head, half of which the mask removes."""
RESULTS = {
    "forward": ("out",),
    "key_gradients": ("dk", "dv"),
    "query_gradients": ("dq",),
    "forward and backward": ("out", "dq", "dk", "dv"),
}


class Shape(NamedTuple):
    """q is [b, s, n, h]; k and v are [b, s, g, h]."""

    b: int
    s: int
    n: int
    g: int
    h: int


SHAPES = [Shape(2, 8192, 32, 8, 128), Shape(64, 512, 12, 12, 64)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the shapes that the command line names; exits with 1 if a kernel of ours failed."""
    module = "benchmarks.kernels.attention"
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=__doc__)
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=SHAPES, metavar="BxSxNxGxH")
    parser.add_argument("--first", action="store_true", help="only the blocks that the library uses")
    parser.add_argument("--peers", action="store_true", help="also PyTorch's flex_attention and SDPA")
    parser.add_argument("--page", type=pathlib.Path, help="write what runs where into this page, and end")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    if options.page is not None:
        options.page.write_text(insert(options.page.read_text(), {"kernels": kernels_table()}))
        return
    if current_target() is None:
        raise SystemExit(f"{module} needs a GPU and Triton: install mxjax[cuda] or mxjax[rocm]")
    report = Report(module, arguments, options)
    for shape in options.shapes:
        title = f"q {[shape.b, shape.s, shape.n, shape.h]}, {shape.g} heads of keys"
        records = time_cases(report, f"{title}: each kernel", "FLOP", kernel_cases(shape, options.first))
        fastest = fastest_blocks(records)
        if fastest is not None:
            time_cases(report, f"{title}: attention", "FLOP", whole_cases(shape, fastest))
            time_cases(report, f"{title}: masked", "FLOP", masked_cases(shape, fastest, options.peers))
    report.print()


DEVICES: Mapping[str, tuple[Target | None, bool]] = {
    "NVIDIA GPUs": (Target("cuda", "sm_90"), True),
    "gfx950": (Target("hip", "gfx950"), False),
    "others": (None, False),
}
"""The target of kernels, and whether it is an NVIDIA GPU, of each device in the table."""
QUERIES = {
    "bfloat16, heads of 64 or 128": ((8192, 64, "bfloat16"), (8192, 128, "bfloat16")),
    "the same, odd lengths": ((8191, 64, "bfloat16"), (8191, 128, "bfloat16")),
    "bfloat16, other multiples of 8 below 128": tuple((8192, h, "bfloat16") for h in (8, 16, 32, 96, 120)),
    "float32, or other heads": ((8192, 128, "float32"), (8192, 20, "bfloat16"), (8192, 256, "bfloat16")),
}
"""Length, head size and dtype of the queries of each column; one kernel takes all of them."""


def kernels_table() -> str:
    """Returns which kernel runs where, as `models.attention.causal` chooses, in a Markdown table."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for device, (target, cuda) in DEVICES.items():
        for mask in ("none", "documents", "windows or sinks"):
            ours = "AITER or Triton" if aiter.suits(target, mask == "windows or sinks") else "Triton"
            names, cells = {"cudnn": "cuDNN", "ours": ours, "xla": "XLA"}, []
            for queries in QUERIES.values():
                shapes = [jax.ShapeDtypeStruct((2, s, 32, h), dtype) for s, h, dtype in queries]
                [kernel] = {kernel_on(target, cuda, q, mask == "none") for q in shapes}
                cells.append(names[kernel])
            rows.setdefault((device, *cells), []).append(mask)
    merged = [[device, ", ".join(masks), *cells] for (device, *cells), masks in rows.items()]
    return table(f"device | mask or sinks | {' | '.join(QUERIES)}", merged).replace("---:", "---")


def parse_shape(text: str) -> Shape:
    """Returns the shape of a text like 2x8192x32x8x128."""
    try:
        shape = Shape(*(int(n) for n in text.split("x")))
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 2x8192x32x8x128") from error
    if min(shape) < 1 or shape.h not in HEAD_SIZES or shape.n % shape.g:
        raise argparse.ArgumentTypeError(f"{text!r} needs N a multiple of G, and H of {HEAD_SIZES}")
    return shape


def kernel_cases(shape: Shape, first: bool = False) -> Iterator[Case]:
    """Yields the candidates of each kernel, or the first of each."""
    for which, blocks in candidates(current_target(), shape.h)._asdict().items():
        for one in blocks[:1] if first else blocks:
            queries, keys, warps, stages = one
            name = f"{which}, {queries} queries x {keys} keys, {warps} warps, {stages} stages"
            run = functools.partial(_one_kernel, which, one)
            yield _case(name, shape, which, run, {"by": "mxjax", "blocks": list(one)})


def fastest_blocks(records: Sequence[Mapping[str, Any]]) -> Kernels | None:
    """Returns the fastest block of each kernel, or None if one has none."""
    found = []
    for which in Kernels._fields:
        timed = [r for r in records if r["which"] == which]
        if not timed:
            return None
        found.append((Blocks(*min(timed, key=lambda r: r["median"])["blocks"]),))
    return Kernels(*found)


def whole_cases(shape: Shape, fastest: Kernels) -> Iterator[Case]:
    """Yields attention by cuDNN, by XLA, and by one block of each of our kernels."""
    for which in ("forward", "forward and backward"):
        for by in ("cudnn", "xla"):
            attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=by)
            run = functools.partial(_by_gradient, which, attend)
            yield _case(f"{which}, {by}", shape, which, run, {"by": by})
        run = functools.partial(_all_kernels, which, fastest)
        fields = {"by": "mxjax", "blocks": [list(blocks[0]) for blocks in fastest]}
        yield _case(f"{which}, mxjax, fastest blocks", shape, which, run, fields)


def masked_cases(shape: Shape, fastest: Kernels, with_peers: bool = False) -> Iterator[Case]:
    """Yields attention by our kernels without a mask and with each, by cuDNN with windows, and PyTorch's."""
    for mask in (None, "documents", shape.s // 2, shape.s // 4):
        for which in ("forward", "forward and backward"):
            name = f"window {mask}" if isinstance(mask, int) else mask or "causal"
            run = functools.partial(_all_kernels, which, fastest)
            yield _case(f"{which}, {name}, mxjax", shape, which, run, {"by": "mxjax", "mask": mask})
            if isinstance(mask, int):
                attend = functools.partial(
                    jax.nn.dot_product_attention,
                    is_causal=True,
                    local_window_size=(mask - 1, 0),
                    implementation="cudnn",
                )
                run = functools.partial(_by_gradient, which, attend)
                yield _case(f"{which}, {name}, cudnn", shape, which, run, {"by": "cudnn", "mask": mask})
            for by, make in peers.attentions(mask is not None).items() if with_peers else ():
                case = _case(f"{which}, {name}, {by}", shape, which, run, {"by": by, "mask": mask})
                yield case._replace(check=functools.partial(_check_peer, shape, which, mask, make))


def draw_mask(shape: Shape, mask: str | int | None) -> jax.Array | None:
    """Returns `first_key` of documents or of a window."""
    if mask is None or isinstance(mask, int):
        return None if mask is None else first_keys(jnp.zeros(shape[:2], jnp.int32), mask)
    rng = np.random.default_rng(0)
    starts = np.zeros(shape[:2], np.int32)
    for row in starts:
        lengths = np.minimum(rng.zipf(1.5, size=shape.s) * 64, 16 * MEAN_DOCUMENT)
        ends = np.cumsum(np.maximum(lengths * (MEAN_DOCUMENT / lengths.mean()), 1).astype(int))
        row[ends[ends < shape.s]] = ends[ends < shape.s]
    return jnp.asarray(np.maximum.accumulate(starts, axis=1))


def _case(name: str, shape: Shape, which: str, run: Callable, fields: Mapping[str, Any]) -> Case:
    flops = PASSES[which] * shape.b * shape.n * shape.h * float(shape.s) ** 2
    fields = {"shape": "x".join(map(str, shape)), "which": which, **fields}
    check = functools.partial(_check, shape, which, fields["by"], fields.get("mask"), jax.jit(run))
    return Case(name, check, flops, fields["by"] == "mxjax", fields["by"] == "cudnn", fields)


def _check(shape: Shape, which: str, by: str, mask: str | int | None, run: Callable) -> Checked:
    """Compares a pass with the float32 reference, and our runs with each other.

    Fused backward passes take row products from the output that they returned, in bfloat16, which the
    reference then does too; XLA's does not and is timed whatever its error.
    """
    tensors, wanted = _tensors(shape, mask)
    results = run(*tensors)
    if which == "forward and backward" and by != "xla":
        wanted = _reference(*tensors[:4], tensors[6], results[0])
    pairs = zip(RESULTS[which], results, strict=True)
    error = max(float(_distance(got, wanted[name])) for name, got in pairs)
    assert by == "xla" or error < LARGEST_ERROR, f"differs from the float32 reference by {error:.2g}"
    for _ in range(REPEATS - 1 if by == "mxjax" else 0):
        for name, a, b in zip(RESULTS[which], run(*tensors), results, strict=True):
            assert bool(jnp.all(a == b)), f"another run gives other bits of {name}"
    return Checked(functools.partial(run, *tensors), error)


def _check_peer(shape: Shape, which: str, mask: str | int | None, make: Callable[..., Checked]) -> Checked:
    tensors, wanted = _tensors(shape, mask)
    checked = make(tensors[:4], tensors[6], which != "forward")
    results: Any = checked.run()
    results = [jnp.asarray(x.detach().float().cpu().numpy()) for x in results]
    pairs = zip(RESULTS[which], results, strict=True)
    error = max(float(_distance(got, wanted[name])) for name, got in pairs)
    assert error < 5 * LARGEST_ERROR, f"differs from the float32 reference by {error:.2g}"
    return checked._replace(error=error)


def _one_kernel(which: str, blocks: Blocks, q, k, v, dout, lse, delta, _) -> list[jax.Array]:
    target = current_target()
    q, dout = _grouped(q, k), _grouped(dout, k)
    if which == "forward":
        return [_flat(launches.forward(q, k, v, target, blocks)[0])]
    if which == "key_gradients":
        return list(launches.key_gradients(q, k, v, dout, lse, delta, target, blocks))
    return [_flat(launches.query_gradients(q, k, v, dout, lse, delta, target, blocks))]


def _all_kernels(which: str, kernels: Kernels, q, k, v, dout, lse, delta, first_key) -> list[jax.Array]:
    del lse, delta
    target = current_target()
    q, dout = _grouped(q, k), _grouped(dout, k)
    out, lse = launches.forward(q, k, v, target, kernels.forward[0], first_key=first_key)
    if which == "forward":
        return [_flat(out)]
    given = (q, k, v, dout, lse, launches.row_products(out, dout), target)
    dk, dv = launches.key_gradients(*given, kernels.key_gradients[0], first_key=first_key)
    dq = launches.query_gradients(*given, kernels.query_gradients[0], first_key=first_key)
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
def _tensors(shape: Shape, mask: str | int | None) -> tuple[list[Any], dict[str, jax.Array]]:
    """Returns q, k, v, dout, lse, delta and `first_key`, and the float32 reference's results."""
    b, s, n, g, h = shape
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = ((b, s, n, h), (b, s, g, h), (b, s, g, h), (b, s, n, h))
    pairs = zip(keys, sizes, strict=True)
    q, k, v, dout = (jax.random.normal(key, size, jnp.bfloat16) for key, size in pairs)
    first_key = draw_mask(shape, mask)
    wanted = _reference(q, k, v, dout, first_key)
    delta = launches.row_products(_grouped(wanted["out"], k), _grouped(dout, k))
    return [q, k, v, dout, wanted.pop("lse"), delta, first_key], wanted


@jax.jit
def _reference(q, k, v, dout, first_key, rounded=None) -> dict[str, jax.Array]:
    """Returns attention, its gradients and lse in float32, by the formulas.

    Args:
      rounded: the output from which to take row products instead of the float32 one. An error of a row's
        product scales the row's weights in dq and dk. That changes the first rows most, whose few terms
        nearly cancel.
    """
    dot = functools.partial(jnp.einsum, precision="highest")
    scale = q.shape[-1] ** -0.5

    if first_key is None:
        first_key = jnp.zeros(q.shape[:2], jnp.int32)

    def one_head(first_key_S, q_SRH, k_TH, v_TH, dout_SRH, rounded_SRH):
        scores = dot("srh,th->rst", q_SRH, k_TH) * scale
        seen = jnp.tri(*scores.shape[1:], dtype=bool) & (first_key_S[:, None] <= jnp.arange(len(k_TH)))
        scores = jnp.where(seen, scores, -jnp.inf)
        p = jax.nn.softmax(scores)
        out = dot("rst,th->srh", p, v_TH)
        delta = jnp.sum((out if rounded is None else rounded_SRH) * dout_SRH, axis=-1)
        of_scores = p * (dot("srh,th->rst", dout_SRH, v_TH) - delta.T[..., None]) * scale
        dq, dk = dot("rst,th->srh", of_scores, k_TH), dot("rst,srh->th", of_scores, q_SRH)
        return out, dq, dk, dot("rst,srh->th", p, dout_SRH), jax.nn.logsumexp(scores, axis=-1)

    used = dout if rounded is None else rounded
    # One sequence and key head after another, axes 0 and 2: all scores at once do not fit.
    heads = [_grouped(q, k), k, v, _grouped(dout, k), _grouped(used, k)]
    heads = [x.astype(jnp.float32).swapaxes(1, 2) for x in heads]

    def one_sequence(rows):
        return jax.lax.map(lambda row: one_head(rows[0], *row), tuple(rows[1:]))

    found = jax.lax.map(one_sequence, (first_key, *heads))
    out, dq, dk, dv, lse = (x.swapaxes(1, 2) for x in found)
    return {"out": _flat(out), "dq": _flat(dq), "dk": dk, "dv": dv, "lse": lse.swapaxes(1, 2)}


@jax.jit
def _distance(got: jax.Array, wanted: jax.Array) -> jax.Array:
    norms = jnp.linalg.norm(wanted, axis=-1)
    return jnp.max(jnp.linalg.norm(got.astype(jnp.float32) - wanted, axis=-1) / (norms + jnp.mean(norms)))


if __name__ == "__main__":
    main()
