"""Programs of test_context.py and test_expert_parallel.py on 8 virtual devices, in a process of their own."""

import dataclasses
import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

import mxjax
from models import decoder
from models.attention.context import cut
from models.attention.documents import Documents
from models.configs import DecoderConfig, ExpertsConfig
from models.experts.order import sort_by_expert
from models.experts.parallel import exchange_on_mesh
from models.sharding import weight_layout
from mxjax.runtime.devices import INTERPRETER, use_target
from training.process.environment import enable_compilation_cache
from training.sharding import compiler_options, make_mesh, param_shardings, parameter_axes

# Two blocks with another window each, sinks, and two query heads a key/value head.
MODEL = DecoderConfig(256, 256, 2, 8, 4, 32, 256, rope_theta=10_000.0, windows=(0, 40), sinks=True)
PLAIN = dataclasses.replace(MODEL, windows=(), sinks=False)
EXPERTS = DecoderConfig(
    *(256, 128, 2, 4, 4, 32, 64),
    rope_theta=10_000.0,
    init_std=0.1,  # so that routers prefer some experts
    experts=ExpertsConfig(8, 2, biased=True, balance_loss=0.01, z_loss=1e-3),
    dense_d_ff=(128, 0),
    rope_layers=(1, 0),
)


def relative(found, expected) -> float:
    """Returns the largest relative error of arrays, by their norms."""
    errors = jax.tree.map(lambda x, y: np.linalg.norm(x - y) / np.linalg.norm(y), found, expected)
    return float(max(jax.tree.leaves(errors)))


def losses(*cases: str) -> None:
    """For each POLICY:MESH:SEQUENCES:LENGTH prints how far loss and gradients are from one device's.

    With :plain attention has no mask besides the causal one, and no sinks.
    """
    for case in cases:
        policy, text, sequences, length, *plain = case.split(":")
        model = EXPERTS if "expert" in text else PLAIN if plain else MODEL
        params = decoder.init(model, jax.random.key(0))
        policies = decoder.layer_policies(
            model, mxjax.get_policy(policy), [("blocks.*.attention.[sv]*", mxjax.get_policy("fp32"))]
        )
        batch = np.random.default_rng(0).integers(1, 256, (int(sequences), int(length) + 1), np.int32)
        batch[:, 3 * int(length) // 5] = 0  # ends a document

        def loss(params, batch, model=model, policies=policies):
            documents = None if model == PLAIN else Documents(0, True)
            options = {"policies": policies, "key": jax.random.key(1), "dtype": jnp.float32}
            return decoder.mean_loss(model, params, batch, documents=documents, **options)

        found = []
        for mesh in (make_mesh(text), make_mesh(devices=jax.devices()[:1])):
            options = compiler_options(mesh, policies.policies, None)
            with jax.set_mesh(mesh):
                given = jax.device_put(params, param_shardings(mesh, parameter_axes(params)))
                run = jax.jit(jax.value_and_grad(loss), compiler_options=options)
                found.append(jax.device_get(run(given, batch)))
        (a, da), (b, db) = found
        print(json.dumps({"case": case, "loss": float(abs(a / b - 1)), "gradients": relative(da, db)}))


def products(*policies: str) -> None:
    """For each policy prints how far a product of a sequence on context=8 and its gradients are from one
    device's."""
    x, dy = np.random.default_rng(0).standard_normal((2, 1, 512, 64)).astype(np.float32)
    w = np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)
    for policy in policies:

        def product(x, w, dy, parts, policy=policy):
            x, dy = (cut(t, parts) for t in (x, dy))
            options = {"policy": policy, "key": jax.random.key(0), "layout": weight_layout(("mlp", "norm"))}
            y, back = jax.vjp(lambda x, w: mxjax.dot(x, w, **options), x, w)
            dx, dw = back(dy)
            return y.reshape(-1, 64), dx.reshape(-1, 64), dw

        found = []
        for mesh in (make_mesh("context=8"), make_mesh(devices=jax.devices()[:1])):
            with jax.set_mesh(mesh):
                found.append(jax.device_get(jax.jit(product, static_argnums=3)(x, w, dy, mesh.size)))
        errors = [relative(a, b) for a, b in zip(*found, strict=True)]
        print(json.dumps({"policy": policy, "errors": errors}))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def experts_product(policy, travels, implementation, x, w, dy):
    """Returns the rows of experts, the products of tokens with two of them each, and their gradients."""
    rng = np.random.default_rng(0)
    skewed = rng.exponential(size=(len(x), 8)) * 2.0 ** -np.arange(8)  # the last has few tokens or none
    chosen = jnp.asarray(np.argsort(-skewed)[:, :2], jnp.int32)

    def forward(x, w):
        order = exchange_on_mesh(chosen, 8, [policy], travels) or sort_by_expert(chosen, 8)
        options = {"policy": policy, "key": jax.random.key(0), "preferred_element_type": x.dtype}
        options |= {"implementation": implementation}
        rows = order.spread(x)
        return order.collect(order.product(rows, w, **options), 2), rows

    y, back, rows = jax.vjp(forward, x, w, has_aux=True)
    return rows, y, *back(dy)


def experts_operands(dtype):
    """Returns x, w and dy of `experts_product`."""
    rng = np.random.default_rng(1)
    x, dy = rng.standard_normal((256, 96)), rng.standard_normal((256, 2, 64))
    return x.astype(dtype), rng.standard_normal((8, 96, 64), np.float32), dy.astype(dtype)


def experts(*cases: str) -> None:
    """For each POLICY:MESH prints how far experts' products and their gradients are from one device's.

    With :IMPLEMENTATION they are those of `mxjax.ragged_dot`.
    """
    for case in cases:
        policy, text, *implementation = case.split(":")
        choice = (mxjax.get_policy(policy), None, implementation[0] if implementation else None)
        found = []
        for mesh in (make_mesh(text), make_mesh(devices=jax.devices()[:1])):
            with jax.set_mesh(mesh):
                given = experts_operands(np.float32)
                found.append(jax.device_get(experts_product(*choice, *given))[1:])
        errors = [relative(a, b) for a, b in zip(*found, strict=True)]
        print(json.dumps({"case": case, "errors": errors}))


def kernels(*cases: str) -> None:
    """For each POLICY:MESH:IMPLEMENTATION prints the errors of `experts` by kernels, and which multiplied.

    One device multiplies without kernels. Triton's interpreter runs in `jax.shard_map`, not in a partitioned
    function, so definitions quantize.
    """
    from mxjax.kernels.matmul import grouped
    from mxjax.products import prepare
    from support.interpreter import speed_up

    speed_up()
    launched: list[str] = []
    launch, prepare._kernel_takes = grouped._launch, lambda *_: False

    def launch_and_note(kernel, *arguments):
        launched.append(kernel.__name__)
        return launch(kernel, *arguments)

    grouped._launch = launch_and_note
    for case in cases:
        name, text, implementation = case.split(":")
        policy, given, found = mxjax.get_policy(name), experts_operands(jnp.bfloat16), []
        devices = int(np.prod([int(axis.partition("=")[2]) for axis in text.split(",")]))
        for target, count, choice in ((INTERPRETER, devices, implementation or None), (None, 1, "xla")):
            mesh = make_mesh(text if count > 1 else None, jax.devices()[:count])
            with use_target(target), jax.set_mesh(mesh):
                found.append(jax.device_get(experts_product(policy, None, choice, *given))[1:])
        errors = [relative(*map(np.float64, pair)) for pair in zip(*found, strict=True)]
        print(json.dumps({"case": case, "errors": errors, "kernels": sorted(launched)}))
        launched.clear()


def traffic(*cases: str) -> None:
    """For each POLICY:MESH prints whether packed tokens arrive quantized, and whether their products and
    gradients have the bits of whole ones."""
    for case in cases:
        policy, text = case.split(":")
        policy = mxjax.get_policy(policy)
        with jax.set_mesh(make_mesh(text)):
            given = experts_operands(jnp.bfloat16)
            whole, packed = (jax.device_get(experts_product(policy, t, None, *given)) for t in (None, "fp4"))
        quantized = mxjax.dequantize(mxjax.quantize(whole[0], policy.fprop.lhs), jnp.bfloat16)
        same = [bool(np.array_equal(a, b)) for a, b in zip((quantized, *whole[1:]), packed, strict=True)]
        print(json.dumps({"case": case, "same": same, "whole": bool(np.array_equal(whole[0], packed[0]))}))


if __name__ == "__main__":
    enable_compilation_cache()
    programs = {f.__name__: f for f in (losses, products, experts, kernels, traffic)}
    for word in sys.argv[1:]:  # the name of a program, before the cases of each
        if word in programs:
            program = programs[word]
        else:
            program(word)
