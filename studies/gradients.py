"""Measures what quantization does to a real gradient: the errors of dw by policy, and the values of dy.

    python -m studies.gradients [--steps 50] [--out docs/results/gradients.json] [--page docs/gradients.md]

The model is a small transformer over bytes in Linen, trained for some steps in float32. x, w and dy of each
linear layer of its last block come from one further batch. `python -m studies.figures` draws the JSON.
"""

import argparse
import inspect
import json
import pathlib
import shlex
import sys
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen
from jax import lax
from matplotlib.figure import Figure

import mxjax
from mxjax.runtime.checkout import commit
from mxjax.runtime.tables import insert, table

WIDTH, HEADS, BLOCKS, BATCH, TIME = 128, 4, 2, 16, 64
LAYERS = ("query", "key", "value", "out", "up", "down")
"""The linear layers of a block, in the order in which they multiply."""
POLICIES = ("fp8", "wgrad", "wgrad_hadamard", "full_hadamard", "wgrad_sr", "tetrajet", "nvfp4")
HISTOGRAM = "up"
"""The layer whose dy is shown."""
Layers = dict[str, tuple[jax.Array, jax.Array, jax.Array]]


class Model(linen.Module):
    """A causal transformer over bytes."""

    dot_general: Any = None
    width: int = WIDTH
    time: int = TIME

    @linen.compact
    def __call__(self, tokens):
        place = self.param("place", linen.initializers.normal(0.02), (self.time, self.width))
        x = linen.Embed(256, self.width, name="embed")(tokens) + place
        for i in range(BLOCKS):
            x = Block(self.dot_general, name=f"block{i}")(x)
        return linen.Dense(256, name="head")(linen.LayerNorm()(x))


class Block(linen.Module):
    """Attention and an MLP; its linear layers multiply by `dot_general`."""

    dot_general: Any = None

    @linen.compact
    def __call__(self, x):
        dot = {"dot_general": self.dot_general}
        attend = linen.MultiHeadDotProductAttention(
            HEADS, name="attention", qkv_dot_general=self.dot_general, out_dot_general=self.dot_general
        )
        mask = linen.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + attend(linen.LayerNorm()(x), mask=mask)
        hidden = linen.gelu(linen.Dense(4 * x.shape[-1], name="up", **dot)(linen.LayerNorm()(x)))
        return x + linen.Dense(x.shape[-1], name="down", **dot)(hidden)


def batches_of_source(count: int) -> np.ndarray:
    """Returns batches [count, BATCH, TIME + 1] of bytes, drawn from modules of the standard library."""
    text = b"".join(
        pathlib.Path(inspect.getfile(m)).read_bytes() for m in (argparse, inspect, textwrap, json)
    )
    starts = np.random.default_rng(0).integers(0, len(text) - TIME - 1, (count, BATCH))
    return np.frombuffer(text, np.uint8)[starts[..., None] + np.arange(TIME + 1)].astype(np.int32)


def main() -> None:
    """Trains, measures and writes the numbers."""
    parser = argparse.ArgumentParser(prog="python -m studies.gradients", description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/results/gradients.json"))
    parser.add_argument("--page", type=pathlib.Path, help="measure nothing; write the table into this page")
    options = parser.parse_args()
    if options.page is not None:
        found = errors_table(json.loads(options.out.read_text()))
        options.page.write_text(insert(options.page.read_text(), {"errors": found}))
        return
    *batches, last = batches_of_source(options.steps + 1)
    layers = gradients_of(train(batches), last)
    content = {
        "commit": commit() or "unknown",
        "command": shlex.join(["python", "-m", "studies.gradients", *sys.argv[1:]]),
        "jax": jax.__version__,
        "steps": options.steps,
        "errors": {policy: errors_of(policy, layers) for policy in POLICIES},
        "values": histogram(layers[HISTOGRAM][2]),
    }
    options.out.write_text(json.dumps(content, indent=1) + "\n")


def errors_table(content: dict[str, Any]) -> str:
    """Returns the ranges over the layers, by policy: projection, and share of dy that becomes zero."""
    rows = []
    for policy, layers in content["errors"].items():
        projections, flushed = ([e[name] for e in layers.values()] for name in ("projection", "flushed"))
        zeros = f"{100 * min(flushed):.0f} to {100 * max(flushed):.0f} %"
        rows.append([f"`{policy}`", f"{min(projections):.3f} to {max(projections):.3f}", zeros])
    return table(" | projection of dw on the exact one | share of dy that becomes zero", rows)


def loss_of(model: Model, params, batch, *arguments) -> jax.Array:
    """Returns the cross-entropy of the next byte."""
    logits = model.apply(params, batch[:, :-1], *arguments)
    assert isinstance(logits, jax.Array)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def train(batches) -> Any:
    """Returns the parameters after a step for each batch, in float32."""
    model, optimizer = Model(), optax.adamw(1e-3)
    params = model.init(jax.random.key(0), batches[0][:, :-1])
    state = optimizer.init(params)

    @jax.jit
    def train_step(params, state, batch):
        grads = jax.grad(lambda params: loss_of(model, params, batch))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for batch in batches:
        params, state = train_step(params, state, batch)
    return params


def gradients_of(params, batch) -> Layers:
    """Returns x [tokens, d_in], w [d_in, d_out] and dy [tokens, d_out] of the last block's linear layers."""
    seen: list[tuple[jax.Array, jax.Array]] = []

    def run(added: list[jax.Array]) -> tuple[jax.Array, list]:
        """Returns the loss, with `added` to each product; its gradients are then the dy."""
        seen.clear()

        def tapped(lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None):
            y = lax.dot_general(lhs, rhs, dimension_numbers, precision, preferred_element_type)
            d_in = int(np.prod([rhs.shape[axis] for axis in dimension_numbers[0][1]]))
            seen.append((lhs.reshape(-1, d_in), rhs.reshape(d_in, -1)))
            return y + added[len(seen) - 1].reshape(y.shape) if added else y

        return loss_of(Model(tapped), params, batch), list(seen)

    _, products = run([])
    zeros = [jnp.zeros((x.shape[0], w.shape[1])) for x, w in products]
    dys, products = jax.grad(run, has_aux=True)(zeros)
    last = slice((BLOCKS - 1) * len(LAYERS), None)
    return {name: (x, w, dy) for name, (x, w), dy in zip(LAYERS, products[last], dys[last], strict=True)}


def errors_of(policy: str, layers: Layers) -> dict[str, dict[str, float]]:
    """Returns, by layer, the errors of dw, and the share of the elements of dy that become zero."""
    found = {}
    for name, tensors in layers.items():
        errors = jax.jit(lambda *t: mxjax.stats.gemms(*t, policy=policy, key=jax.random.key(1)))(*tensors)
        wgrad = errors.wgrad
        found[name] = {
            "sqnr_db": float(wgrad.product.sqnr_db),
            "cosine": float(wgrad.product.cosine),
            "projection": float(wgrad.product.projection),
            "flushed": float(wgrad.rhs.flushed),
        }
    return found


def histogram(dy: jax.Array) -> dict[str, list[float]]:
    """Returns the shares of dy's elements by log2 of their magnitude over their block's largest."""
    blocks = np.abs(np.asarray(dy)).T.reshape(-1, 32)  # along the tokens, as Wgrad reads them
    largest = blocks.max(axis=1, keepdims=True)
    relative = np.log2(np.maximum(blocks, 1e-30) / np.maximum(largest, 1e-30))
    edges = np.arange(-12, 0.5, 0.5)
    counts, _ = np.histogram(np.maximum(relative, -11.9), edges)
    return {"edges": edges.tolist(), "shares": (counts / relative.size).tolist()}


def draw_errors(content: dict[str, Any]) -> Figure:
    """Draws signal to noise of dw by policy, a dot for each layer, the policy with the least noise first."""
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()

    def mean(policy: str) -> float:
        return float(np.mean([errors["sqnr_db"] for errors in content["errors"][policy].values()]))

    policies = sorted(content["errors"], key=mean, reverse=True)
    for y, policy in enumerate(policies):
        layers = content["errors"][policy]
        decibels = [errors["sqnr_db"] for errors in layers.values()]
        axes.plot([min(decibels), max(decibels)], [y, y], color="#d0d4da", linewidth=3, zorder=1)
        axes.plot(decibels, [y] * len(decibels), "o", color="#17365d", markerfacecolor="white", markersize=6)
        place: dict[str, Any] = {"textcoords": "offset points", "va": "center"}
        axes.annotate(f"{mean(policy):.1f}", (max(decibels), y), (8, 0), **place)
    axes.set_yticks(range(len(policies)), policies)
    axes.set_ylim(len(policies) - 0.5, -0.5)
    axes.margins(x=0.1)
    axes.set_xlabel("signal to quantization noise of dw, dB, of six layers and their mean")
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    return figure


def draw_values(content: dict[str, Any]) -> Figure:
    """Draws the histogram of dy, with the range that E2M1 rounds to zero."""
    figure = Figure(figsize=(7, 2.8), layout="constrained")
    axes = figure.subplots()
    edges, shares = content["values"]["edges"], content["values"]["shares"]
    axes.bar(edges[:-1], [100 * s for s in shares], 0.5, align="edge", color="#7f9fc4", edgecolor="black")
    # A block's scale puts its largest magnitude into [4, 8) and E2M1 rounds up to 1/4 to zero.
    axes.axvspan(edges[0], -5, color="#d0d4da", zorder=0)
    axes.axvspan(-5, -4, color="#d0d4da", alpha=0.5, zorder=0)
    axes.annotate(
        "always zero in MXFP4", (edges[0], axes.get_ylim()[1]), (4, -4), textcoords="offset points", va="top"
    )
    axes.set(xlabel="log2 of |dy| over its block's largest", ylabel="% of elements", xlim=(edges[0], 0))
    return figure


if __name__ == "__main__":
    main()
