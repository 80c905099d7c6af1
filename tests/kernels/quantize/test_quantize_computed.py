"""RMSNorm and SwiGLU within Hopper's quantizer kernel, beside XLA's and the definitions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support.dots import assert_close, assert_same
from support.marks import parametrize
from support.quantizer import with_operand
from triton.runtime.interpreter import interpreter_builder

import mxjax
from mxjax.kernels.quantize import quantizer
from mxjax.kernels.quantize.quantizer import quantize_computed
from mxjax.numerics.delayed import Scales
from mxjax.numerics.operand import Operand
from mxjax.operands.computed import Gated, GatedGradient, Norm, normed, rms_norm, swiglu
from mxjax.operands.kernel_operand import pack_by_definition
from mxjax.operands.product import Product
from mxjax.operands.use import OperandUse, dequantize_use
from mxjax.policy import Rotation
from mxjax.products import fused
from mxjax.products.fused import fused_mlp, normed_dot
from mxjax.runtime.devices import Target, use_target
from mxjax.runtime.mesh import Layout

ROWS, EPS = OperandUse(-1), 1e-5
COLUMNS = [OperandUse(-2), OperandUse(-2, rotation=Rotation(4)), OperandUse(-2, rotation=Rotation(16))]
KEY = jax.random.key(1)
DRAWN = OperandUse(-2, Operand(rounding="stochastic"), key=KEY)
SIGNED = OperandUse(-2, rotation=Rotation(16, signs="redrawn"), signs=mxjax.random_signs(KEY, 16))
EVEN = [OperandUse(-1, Operand(scale_rule="even")), OperandUse(-2, Operand(scale_rule="even"), Rotation(16))]
RCEIL = OperandUse(-1, Operand(scale_rule="rceil"))
SEEN = DRAWN._replace(operand=Operand(rounding="stochastic", scale_rule="rceil"), reads=RCEIL)
H16 = mxjax.get_policy("wgrad_hadamard")


def draw_operand(kind, r, c):
    """Returns [r, c] of a norm or of SwiGLU, or the gradient of SwiGLU; rows span binades."""
    rng = np.random.default_rng(0)

    def product(n, scale=1.0):
        raw = jnp.asarray(scale * rng.standard_normal((r, n)), jnp.bfloat16)
        return Product(raw, tuple(jnp.asarray(np.exp2(rng.integers(-3, 4, m)), jnp.float32) for m in (r, n)))

    if kind == "normed":
        x = rng.standard_normal((r, c)) * np.exp2(rng.integers(-3, 4, (r, 1)))
        scale = jnp.asarray(1 + rng.standard_normal(c) / 4, jnp.float32)
        return normed(jnp.asarray(x, jnp.bfloat16), Norm(scale, EPS))
    return Gated(product(2 * c)) if kind == "gated" else GatedGradient(product(2 * c), product(c, 2.0**-9))


@pytest.mark.parametrize(
    ("kind", "shape", "uses", "most"),
    [
        *(
            (kind, shape, (ROWS, columns), 1e-3)
            for kind, shape in (("normed", (37, 136)), ("gated", (37, 160)), ("gradient", (37, 160)))
            for columns in (COLUMNS if kind == "normed" else COLUMNS[::2])
        ),
        ("normed", (128, 128), (ROWS, COLUMNS[2]), 1e-3),
        *(
            (kind, (37, 160), uses, 1e-3)
            for kind in ("normed", "gated", "gradient")
            for uses in ((ROWS, SIGNED), (ROWS, DRAWN), EVEN, (RCEIL, SEEN))
            if kind != "gradient" or uses[1] is not SEEN
        ),
        *((kind, (256, 128), (ROWS, COLUMNS[2]), 2e-3) for kind in ("gated", "gradient")),
    ],
)
def test_it_quantizes_what_xla_computes(on_hopper, kind, shape, uses, most):
    """Whole tiles, and edges on both axes: rows end in a group, a block and a tile, columns in a tile."""

    @jax.jit
    def both(x):
        # Without a barrier XLA leaves out roundings between what is computed and the definition.
        values = jax.lax.optimization_barrier(x.value())
        wanted = [
            pack_by_definition(dequantize_use(values, use.reads) if use.reads else values, use)
            for use in uses
        ]
        return jax.tree.leaves(quantize_computed(x, *uses)), jax.tree.leaves(wanted)

    pairs = list(zip(*both(draw_operand(kind, *shape)), strict=True))
    assert all(a.shape == b.shape for a, b in pairs)
    assert sum(int(jnp.sum(a != b)) for a, b in pairs) / sum(a.size for a, _ in pairs) < most


def test_a_shard_of_the_rows_draws_the_bits_of_its_place(on_hopper):
    _, arrays = quantizer.arrays_of(draw_operand("normed", 64, 64), tuple)
    tensor, factors, scale = (array[None] for array in arrays)
    scalars = jnp.concatenate([quantizer.scalars_of(use) for use in (ROWS, DRAWN)])[None]
    run = functools.partial(quantizer.launch_computed, (ROWS, DRAWN.options), "normed")
    places = jnp.arange(64, dtype=jnp.uint32)
    *_, words, _ = run(tensor, factors, scale, scalars, places)
    *_, of_half, _ = run(tensor[:, 32:], factors[:, 32:], scale, scalars, places[32:])
    np.testing.assert_array_equal(of_half, words[..., 4:])


def test_infinities_and_zeros(on_hopper):
    """A row of zeros stays zero. Infinity times its row's factor, 0, is NaN; the row's others are 0."""
    x = draw_operand("normed", 64, 32)
    x = normed(x.x.at[3].set(0).at[40, 5].set(jnp.inf), Norm(x.scale, EPS))
    rows, columns = quantize_computed(x, ROWS, COLUMNS[0])
    assert not np.any(rows.elements[3])
    np.testing.assert_array_equal(rows.packed[1][:, 0] == 255, np.arange(64) == 40)
    assert np.argwhere(columns.packed[1] == 255).tolist() == [[5, 1]]


def test_gates_tiles_end_where_those_of_the_up_projection_begin(on_hopper, monkeypatch):
    """In reverse order the programs write the same: none writes what another does."""
    builder, x = interpreter_builder, draw_operand("gradient", 32, 160)
    wanted, place = quantize_computed(x, ROWS, COLUMNS[0]), builder.set_grid_idx
    monkeypatch.setattr(
        builder, "set_grid_idx", lambda x, y, z: place(builder.grid_dim[0] - 1 - x, y, z), raising=True
    )
    got = quantize_computed(x, ROWS, COLUMNS[0])
    assert_same(jax.tree.leaves(got), jax.tree.leaves(wanted))


def make_layer(kind, seen, policies=(H16, H16), implementation="fp8_carriers"):
    """Returns a layer's loss and result by x, a norm's scale unless `kind` is "mlp", weights and scales.

    `seen` gets whether kernels compute the norm of a product, or the MLP's SwiGLU.
    """

    def loss(x, *arrays):
        *arrays, scales = arrays if isinstance(arrays[-1], list) else (*arrays, [None] * 2)
        norm, weights = (None, arrays) if kind == "mlp" else (Norm(arrays[0], EPS), arrays[1:])
        if kind == "product":
            options = {"policy": policies[0], "key": KEY, "layout": None, "scales": scales[0]}
            y = normed_dot(x, norm, *weights, implementation=implementation, **options)
        else:
            options = {"policies": policies, "keys": [KEY] * 2, "layouts": [None] * 2, "scales": scales}
            y = fused_mlp(x, weights, norm=norm, implementation=implementation, **options)
        seen.append(y is not None)
        if y is None:
            y = x if norm is None else rms_norm(x, norm)
            options = {"implementation": implementation, "preferred_element_type": x.dtype, "key": KEY}
            for i, w in enumerate(weights):
                y = mxjax.dot(swiglu(y) if i else y, w, policy=policies[i], scales=scales[i], **options)
        return jnp.sum(y.astype(jnp.float32) * jnp.sin(jnp.arange(y.size)).reshape(y.shape)), y

    return loss


def draw_layer(kind, tokens, d, width, spread=0):
    """Returns arguments of a layer; rows and columns span binades, for carriers to leave factors."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((*tokens, d)) * np.exp2(rng.integers(-spread, spread + 1, (*tokens, 1)))
    shapes = [(d, width)] if kind == "product" else [(d, 2 * width), (width, d)]
    weights = [rng.standard_normal(shape) / 8 for shape in shapes]
    weights = [w * np.exp2(rng.integers(-spread, spread + 1, (1, w.shape[1]))) for w in weights]
    scale = [] if kind == "mlp" else [1 + rng.standard_normal(d) / 4]
    return jnp.asarray(x, jnp.bfloat16), *(jnp.asarray(t, jnp.float32) for t in (*scale, *weights))


@parametrize(
    ("kind", "implementation", "policy"),
    *(
        ("product", "fp8_carriers", "wgrad_rht"),
        ("product", "fp8_carriers", "tetrajet"),
        ("mlp", "fp8_carriers", "lumen"),
        ("mlp", "fp8_carriers", "wgrad_hadamard"),
        ("product", None, "fp8_delayed"),
        ("normed mlp", None, "fp8_delayed"),
    ),
    slow=[
        ("mlp", "triton", "wgrad_hadamard"),
        ("normed mlp", "fp8_carriers", "wgrad_hadamard"),
        ("normed mlp", "fp8_carriers", "wgrad_rht"),
        ("normed mlp", "fp8_carriers", "wgrad_sr"),
        ("normed mlp", "fp8_carriers", "tetrajet"),
    ],
)
def test_results_and_gradients_are_those_of_separate_steps(
    on_hopper, monkeypatch, kind, implementation, policy
):
    arrays = draw_layer(kind, (2, 40), 64, 96, spread=2)
    policies, bound = (
        [mxjax.get_policy(name) for name in (policy, "wgrad" if kind == "mlp" else policy)],
        2e-3,
    )
    if policy == "fp8_delayed":  # whose gradients have the tensors' magnitudes too
        arrays, bound = (*arrays, [Scales(*map(jnp.float32, (64.0, 256.0, 512.0)))] * 2), 8e-3
    results, seen = [], []
    for fuse in (True, False):
        if not fuse:
            monkeypatch.setattr(fused, "fuses_norm", lambda *_: False)
            monkeypatch.setattr(fused, "_fuses", lambda *_: False)
        layer = make_layer(kind, seen, policies, implementation)
        run = jax.jit(jax.value_and_grad(layer, tuple(range(len(arrays))), has_aux=True))
        results.append(jax.tree.leaves(run(*arrays))[1:])
    assert seen == [True, False]
    assert [a.dtype for a in results[0]] == [a.dtype for a in results[1]]
    assert_close(*results, bound)


@parametrize("kind", slow=["product", "mlp"], exhaustive=["normed mlp"])
def test_mapped_layers(on_hopper, kind):
    """Under vmap of x its tokens join, and under vmap of the gradient each has its own."""
    x, *others = draw_layer(kind, (3, 32), 32, 32)
    layer, axes = make_layer(kind, [], implementation="triton"), (0, *(None for _ in others))
    np.testing.assert_array_equal(jax.vmap(layer, axes)(x, *others)[1], layer(x, *others)[1])

    def of_weights(run):
        return jax.grad(lambda *others: jnp.sum(run(x, *others)[1].astype(jnp.float32)), range(len(others)))

    if kind == "mlp":
        assert_close(of_weights(jax.vmap(layer, axes))(*others), of_weights(layer)(*others), 2e-3)
    gradient = jax.jit(jax.grad(lambda *arrays: layer(*arrays)[0], tuple(range(len(others) + 1))))
    every = jax.vmap(gradient, axes)(x, *others)
    assert_equal = np.testing.assert_array_equal
    if kind != "mlp":  # a norm's gradients sum in another order
        assert_equal = functools.partial(np.testing.assert_allclose, rtol=2e-2, atol=1e-4)
    for i in range(3):
        for one, mapped in zip(gradient(x[i], *others), every, strict=True):
            assert_equal(one.astype(jnp.float32), mapped[i].astype(jnp.float32))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "width"), [("product", 32), ("product", 0), ("mlp", 32)])
def test_on_one_device_by_hand(on_hopper, kind, width):
    """Under shard_map the gradients of the scale and of weights, which are replicated, are summed."""
    mesh = jax.make_mesh((1,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    arrays, seen, implementation = draw_layer(kind, (32,), 32, width), [], "fp8_carriers"
    implementation = "triton" if kind == "mlp" else implementation

    def loss(*arrays):
        return jax.lax.psum(make_layer(kind, seen, implementation=implementation)(*arrays)[0], "a")

    by_hand = jax.shard_map(loss, mesh=mesh, in_specs=(P("a"), P(), P()), out_specs=P())
    got = jax.jit(jax.grad(by_hand, (0, 1, 2)))(*arrays)
    alone = make_layer(kind, [], implementation=implementation)
    wanted = jax.grad(lambda *arrays: alone(*arrays)[0], (0, 1, 2))(*arrays)
    assert seen == [True]
    if kind == "product":
        assert_close(got, wanted, 5e-3)
        return
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=2e-2, atol=1e-5)


def policies(*names, **changes):
    """Returns policies by name; "GEMM.SIDE" changes an operand of wgrad_hadamard."""
    changed = [
        with_operand(H16, *n.split("."), **changes) if "." in n else mxjax.get_policy(n) for n in names
    ]
    return {"policies": tuple(changed)}


NAME = "wgrad_hadamard"


@pytest.mark.parametrize(
    ("kind", "changes", "fuses"),
    [
        *(
            (kind, changes, fuses)
            for kind in ("product", "mlp")
            for changes, fuses in (
                ({}, True),
                (policies("wgrad", "wgrad"), True),
                (policies("full_hadamard", "full_hadamard"), False),  # rotated rows
                (policies("wgrad_sr", "wgrad_rht"), True),
                (policies("full_sr", "full_sr"), False),  # rows too
                (policies("fprop_dgrad", "fprop_dgrad"), False),  # columns in bfloat16
                (policies("primus_turbo", "tetrajet"), True),
                (policies("tetrajet", "primus_turbo"), True),
                (policies("wgrad.lhs", "wgrad.lhs", scale_rule="rceil"), False),
                ({"implementation": "xla"}, False),
                ({"dtype": jnp.float32}, False),
                ({"tokens": 0}, False),
                ({"target": Target("cuda", "sm_89")}, False),
                ({"target": Target("hip", "gfx950")}, False),
            )
        ),
        ("product", policies("fprop.lhs", NAME, gradient="clipped"), False),
        ("product", policies("wgrad.lhs", NAME, source="dequantized"), False),
        ("product", policies("bf16", NAME), False),
        ("product", policies("fprop.rhs", NAME, prescale=0.75), True),
        ("product", {"d": 36}, False),
        ("mlp", policies("bf16", NAME), True),
        ("mlp", policies(NAME, "bf16"), False),
        ("mlp", policies(NAME, "fprop.lhs", gradient="clipped"), False),
        ("mlp", policies("fprop.lhs", NAME, gradient="clipped"), True),
        ("mlp", policies(NAME, "wgrad.lhs", source="dequantized"), False),
        ("mlp", policies("dgrad.lhs", NAME, rounding="stochastic"), True),  # without the gradient
        ("mlp", policies("fprop.rhs", NAME, prescale=0.75), False),
        ("mlp", policies("nvfp4", NAME) | {"implementation": None}, False),  # with a tensor's scale
        ("mlp", policies(NAME, "dgrad.rhs", prescale=0.75), True),  # without the gradient
        ("mlp", policies(NAME, "fprop.rhs", prescale=0.75), True),
        ("mlp", {"width": 48}, False),  # gate and up share a block of the gradient's rows
        ("mlp", {"width": 0}, False),
        ("mlp", {"layout": Layout(P(), P(), whole_sums=False)}, False),
    ],
)
def test_where_kernels_compute(kind, changes, fuses):
    options = {"policies": (H16, H16), "implementation": "triton", "dtype": jnp.bfloat16, "layout": None}
    options |= {"tokens": 16, "d": 40, "width": 64, "target": Target("cuda", "sm_90")} | changes
    d, width, common = options["d"], options["width"], {"implementation": options["implementation"]}
    shapes = [(d,), (d, 32)] if kind == "product" else [(d, 2 * width), (width, d)]
    arguments = [jax.ShapeDtypeStruct((options["tokens"], d), options["dtype"])]
    arguments += [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    def run(x, first, second):
        key, layout = jax.random.key(0), options["layout"]
        if kind == "product":
            policy = options["policies"][0]
            return normed_dot(x, Norm(first, EPS), second, policy=policy, key=key, layout=layout, **common)
        pairs = {"policies": options["policies"], "keys": [key] * 2, "layouts": [layout] * 2}
        return fused_mlp(x, (first, second), **pairs, **common)

    with use_target(options["target"]), jax.set_mesh(jax.make_mesh((1,), ("a",))):
        assert (jax.eval_shape(run, *arguments) is not None) == fuses


@pytest.mark.parametrize(
    ("up", "down", "computes"),
    [
        *((mxjax.get_policy(name),) * 2 + (True,) for name in (NAME, "primus_turbo", "fp8_delayed")),
        *((mxjax.get_policy(name),) * 2 + (False,) for name in ("lumen", "tetrajet")),
        (mxjax.get_policy("bf16"), H16, False),
        (with_operand(H16, "dgrad", "lhs", rounding="stochastic"), H16, False),
        (H16, with_operand(H16, "dgrad", "rhs", prescale=0.75), False),
        (H16, dataclasses.replace(H16, dgrad=mxjax.get_policy("nvfp4").dgrad), False),
    ],
)
def test_where_kernels_compute_the_gradient(up, down, computes):
    x, weights, nothing = (
        jnp.ones((16, 32), jnp.bfloat16),
        [jnp.ones((32, 64)), jnp.ones((32, 32))],
        [None] * 2,
    )
    with use_target(Target("cuda", "sm_90")):
        scales = [Scales(*map(jnp.float32, (1, 1, 1))) if p.delayed else None for p in (up, down)]
        products = fused._products(x, weights, [up, down], [KEY] * 2, None, nothing, scales)
        assert fused._fuses(*products, 16, 32)
        assert fused._fuses_gradient(*products, 16, 32) == computes


def test_an_mlp_whose_norm_no_kernel_computes(on_hopper):
    """SwiGLU may be computed by kernels where the norm is not: the clipped gradient reads that."""
    clipped = with_operand(H16, "fprop", "lhs", gradient="clipped")
    layer = jax.jit(lambda *arrays: make_layer("normed mlp", [], (clipped, H16))(*arrays)[0])
    assert jnp.isfinite(layer(*draw_layer("normed mlp", (16,), 32, 32)))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"keys": [None, None]}, ValueError, "needs key="),
        ({"keys": [1, 1]}, TypeError, "must be a JAX key"),
        ({"shape": (64, 66)}, ValueError, r"fused_mlp needs x \[..., d_in\]"),
    ],
)
def test_errors(options, error, message):
    x, gate_up = jnp.ones((16, 64), jnp.bfloat16), jnp.ones(options.get("shape", (64, 64)))
    drawn = [with_operand(H16, "fprop", "rhs", rounding="stochastic")] * 2
    keys, more = options.get("keys", [jax.random.key(0)] * 2), {"implementation": None, "layouts": [None] * 2}
    with pytest.raises(error, match=message):
        fused_mlp(x, (gate_up, jnp.ones((32, 64))), policies=drawn, keys=keys, **more)


@pytest.mark.parametrize("kind", ["gated", "gradient"])
def test_products_in_float32_are_refused(on_hopper, kind):
    x = jax.tree.map(lambda t: t.astype(jnp.float32), draw_operand(kind, 32, 32))
    with pytest.raises(TypeError, match="tensors in bfloat16"):
        quantize_computed(x, ROWS, COLUMNS[0])


@pytest.mark.parametrize("scale", [(), (1,), (48,)])
@pytest.mark.parametrize("kind", ["product", "normed mlp"])
def test_a_scale_that_does_not_match_is_refused(kind, scale):
    x, _, *weights = draw_layer(kind, (4,), 32, 32)
    with pytest.raises(ValueError, match=r"needs a scale \(32,\)"):
        make_layer(kind, [])(x, jnp.ones(scale), *weights)


def test_weights_that_do_not_match_are_refused():
    x, scale, _ = draw_layer("product", (4,), 32, 32)
    with pytest.raises(ValueError, match=r"normed_dot needs x \[\.\.\., d_in\]"):
        make_layer("product", [])(x, scale, jnp.ones((48, 8)))
