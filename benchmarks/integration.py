"""Measures mxjax beside qwix in one Flax model: lines, seconds forward and backward, losses, and refusals.

    python -m benchmarks.integration [--steps 50] [--out docs/results/integration] [--tables]
    XLA_FLAGS=--xla_gpu_enable_triton_gemm=false python -m … --width 1024 --time 512 --only-ways   # on a GPU

The model is that of `benchmarks.byte_model`. Each way to quantize its linear layers is a function below;
its lines are counted. All start from the same parameters and see the same batches. Prints the tables, writes
OUT.json after every measurement, and the tables of OUT.md if that exists. `--tables` measures nothing and
takes the numbers from OUT.json.
"""

import argparse
import inspect
import json
import pathlib
import shlex
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
from flax import linen

import mxjax
from benchmarks.byte_model import BATCH, BLOCKS, TIME, WIDTH, Model, batches_of_source
from benchmarks.markdown import insert
from mxjax.integrations.qwix import PolicyRule, Provider
from mxjax.kernels.bench.report import commit, first_line, versions
from mxjax.kernels.bench.timing import measure
from mxjax.tables import table

QWIX_MXFP4 = {  # blocks of 32 and MXFP4 in the backward GEMMs too
    "tile_size": 32,
    "additional_qt_config": {
        "dlhs_tile_size": 32,
        "drhs_tile_size": 32,
        "dlhs_residual_qtype": "mxfp4",
        "drhs_residual_qtype": "mxfp4",
        "use_original_residuals": True,
    },
}


def unquantized(model):
    """Returns the model."""
    return model


def qwix_mxfp4(model):
    """Returns the model in MXFP4 by qwix's own rules."""
    rule = qwix.QtRule(
        module_path="block.*",
        weight_qtype="mxfp4",
        act_qtype="mxfp4",
        bwd_qtype="mxfp4",
        op_names=("dot_general",),
        **QWIX_MXFP4,
    )
    return qwix.quantize_model(model, qwix.QtProvider([rule]))


def mxjax_rules(model, policy="wgrad"):
    """Returns the model in a policy by `mxjax.integrations.qwix`."""
    rule = PolicyRule(module_path="block.*", policy=policy)
    return qwix.quantize_model(model, Provider([rule]))


def mxjax_rules_hadamard(model):
    """Returns the model in `wgrad_hadamard` by `mxjax.integrations.qwix`."""
    return mxjax_rules(model, "wgrad_hadamard")


def mxjax_dot_general(model):
    """Returns the model with `mxjax.make_dot_general` as its product."""
    return model.clone(dot_general=mxjax.make_dot_general("wgrad_hadamard"))


WAYS: dict[str, tuple[Callable[[linen.Module], linen.Module], Callable, int]] = {
    "float32, unquantized": (unquantized, unquantized, 0),
    "qwix 0.1.8, mxfp4": (qwix_mxfp4, qwix_mxfp4, len(QWIX_MXFP4["additional_qt_config"]) + 4),
    "mxjax wgrad, by rules": (mxjax_rules, mxjax_rules, 0),
    "mxjax wgrad_hadamard, by rules": (mxjax_rules_hadamard, mxjax_rules, 0),
    "mxjax wgrad_hadamard, by dot_general": (mxjax_dot_general, mxjax_dot_general, 3),
}
"""What quantizes the model, the function whose lines are counted, and the lines it needs elsewhere."""


def main() -> None:
    """Measures everything and writes the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.integration", description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--width", type=int, default=WIDTH, help="width of the model")
    parser.add_argument("--time", type=int, default=TIME, help="bytes of a sequence")
    parser.add_argument("--only-ways", action="store_true", help="leave out what each library refuses")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/results/integration"))
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if options.tables:
        print_tables(json.loads(options.out.with_suffix(".json").read_text()), options.out.with_suffix(".md"))
        return
    content = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "packages": {name: versions()[name] for name in ("jaxlib", "flax", "qwix")},
        "commit": commit(),
        "command": shlex.join(["python", "-m", "benchmarks.integration", *sys.argv[1:]]),
        "model": {
            "width": options.width,
            "blocks": BLOCKS,
            "batch": BATCH,
            "tokens": options.time,
            "steps": options.steps,
        },
        "ways": {},
        "refusals": {},
    }

    def note(kind: str, name: str, found: dict[str, Any]) -> None:
        content[kind][name] = found
        print(name, found, flush=True)
        options.out.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")

    batches, model = (
        batches_of_source(options.steps + 1, options.time),
        Model(None, options.width, options.time),
    )
    for name, (quantize, *_) in WAYS.items():
        note("ways", name, measure_way(model, quantize, batches, options.rounds))
    for name, run in [] if options.only_ways else REFUSALS.items():
        note("refusals", name, {library: outcome(run, library) for library in ("qwix", "mxjax")})
    print_tables(content, options.out.with_suffix(".md"))


def lines_of(function: Callable) -> int:
    """Returns the number of lines in a function's body, zero if it returns the model alone."""
    body = textwrap.dedent(inspect.getsource(function)).splitlines()[1:]
    return 0 if [line.strip() for line in body] == ["return model"] else len(body)


def measure_way(model: linen.Module, quantize: Callable, batches: np.ndarray, rounds: int) -> dict[str, Any]:
    """Returns seconds of a forward and backward pass, and the losses of training."""
    params = jax.jit(model.init)(jax.random.key(0), batches[0, :, :-1])
    model = quantize(model)
    optimizer = optax.adamw(1e-3)
    state = optimizer.init(params)

    def loss(params, batch):
        logits: Any = model.apply(params, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    both_ways = jax.jit(jax.value_and_grad(loss))

    @jax.jit
    def train_step(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    seconds = measure(both_ways, params, batches[0], rounds=rounds)
    losses = []
    for batch in batches:
        params, state, value = train_step(params, state, batch)
        losses.append(float(value))
    return {"seconds": seconds._asdict(), "losses": losses, "last": float(np.mean(losses[-5:]))}


PROVIDERS: list[Provider] = []
"""mxjax's providers, which say afterwards what they left as it is."""


def quantized(model: linen.Module, library: str) -> linen.Module:
    """Returns a model with all its products in MXFP4."""
    if library == "mxjax":
        PROVIDERS.append(Provider([PolicyRule(policy="wgrad")]))
        return qwix.quantize_model(model, PROVIDERS[-1])
    rule = qwix.QtRule(weight_qtype="mxfp4", act_qtype="mxfp4", bwd_qtype="mxfp4", **QWIX_MXFP4)
    return qwix.quantize_model(model, qwix.QtProvider([rule]))


def dense(width: int, d_in: int, tokens: int = 96, dtype=jnp.float32):
    """Returns a function that makes a gradient of one Dense layer by a library."""

    def run(library: str, transform: Callable = jax.grad):
        layer = quantized(linen.Dense(width, dtype=dtype), library)
        x = jax.random.normal(jax.random.key(0), (tokens, d_in), dtype)
        params = linen.Dense(width).init(jax.random.key(1), x)

        def loss(params: Any) -> jax.Array:
            y: Any = layer.apply(params, x)
            return jnp.sum(y.astype(jnp.float32) ** 2)

        return transform(loss)(params)

    return run


def convolution(library: str):
    """Runs a convolution quantized by the library."""
    layer = quantized(linen.Conv(32, (3, 3)), library)
    x = jnp.ones((1, 8, 8, 32))
    return layer.apply(linen.Conv(32, (3, 3)).init(jax.random.key(0), x), x)


def attention(library: str):
    """Runs an attention layer quantized by the library."""
    layer = quantized(linen.MultiHeadDotProductAttention(2), library)
    x = jax.random.normal(jax.random.key(0), (2, 16, 64))
    return layer.apply(linen.MultiHeadDotProductAttention(2).init(jax.random.key(1), x), x)


def forward_mode(f: Callable) -> Callable:
    """Returns the derivative of f along its own argument."""
    return lambda params: jax.jvp(f, (params,), (params,))


def second_derivative(f: Callable) -> Callable:
    """Returns the gradient of the squared norm of f's gradient."""
    return lambda params: jax.grad(lambda p: jnp.sum(jax.grad(f)(p)["params"]["kernel"] ** 2))(params)


REFUSALS: dict[str, Callable] = {
    "d_in of 48": dense(64, 48),
    "d_out of 48": dense(48, 64),
    "50 tokens": dense(64, 64, tokens=50),
    "x of the weight's shape": dense(64, 64, tokens=64),
    "float16": dense(64, 64, dtype=jnp.float16),
    "bfloat16": dense(64, 64, dtype=jnp.bfloat16),
    "attention's products": attention,
    "a convolution": convolution,
    "forward mode": lambda library: dense(64, 64)(library, forward_mode),
    "a second derivative": lambda library: dense(64, 64)(library, second_derivative),
}


def outcome(run: Callable, library: str) -> str:
    """Returns whether it runs, with how many products are not quantized, or the first line of the error."""
    try:
        results = jax.block_until_ready(run(library))
    except Exception as error:
        return first_line(error)
    finite = all(bool(jnp.all(jnp.isfinite(t))) for t in jax.tree.leaves(results))
    if library == "qwix" or not finite:
        return "runs" if finite else "not finite"
    products = PROVIDERS[-1].products.values()
    left = sum(product.startswith("as it is") for product in products)
    if not products:
        return "runs, not quantized"
    return f"runs, {left} of {len(products)} products not quantized" if left else "runs"


def print_tables(content: dict[str, Any], page: pathlib.Path) -> None:
    """Prints the numbers and the lines of the functions above, and writes them into the page if it exists."""
    base = content["ways"]["float32, unquantized"]["seconds"]["median"]
    ways = [
        [
            name,
            lines_of(WAYS[name][1]) + WAYS[name][2],
            *(f"{1e3 * way['seconds'][q]:.1f}" for q in ("median", "p10", "p90")),
            f"{way['seconds']['median'] / base:.1f}",
            f"{way['last']:.3f}",
        ]
        for name, way in content["ways"].items()
    ]
    refusals = [[name, by["qwix"], by["mxjax"]] for name, by in content["refusals"].items()]
    named = {"ways": table(" | lines | ms | p10 | p90 | of float32 | loss", ways)}
    if refusals:
        named["refusals"] = table(" | qwix | mxjax", refusals)
    print(*named.values(), sep="\n\n")
    if page.exists():
        page.write_text(insert(page.read_text(), named))


if __name__ == "__main__":
    main()
