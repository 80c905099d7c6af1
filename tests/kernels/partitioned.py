"""Run by test_mesh.py on 8 virtual devices: the quantizer on meshes, with a jax.numpy kernel.

Callbacks cannot run inside a partitioned function, so Triton's interpreter cannot but in shard_map. What is
tested is how tensors are cut up, and that random bits go by the position in the whole.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import plain_kernels
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from partitioned_attention import check_attention
from plain_kernels import COMPUTED_INPUTS, plain_block16, plain_carry, plain_cast, plain_clip, plain_product
from support.interpreter import speed_up

import mxjax
from mxjax.kernels.matmul import fp4_gemm, fp8_matmul, scaled_blocks
from mxjax.kernels.quantize import block16, clipped, fp8, fp8_computed, quantiles, quantizer
from mxjax.kernels.quantize.quantizer import quantize_computed, quantize_operands
from mxjax.numerics.operand import Operand
from mxjax.operands import split
from mxjax.operands.computed import Gated, GatedGradient, Norm, normed
from mxjax.operands.kernel_operand import pack_by_definition
from mxjax.operands.product import Product
from mxjax.operands.use import OperandUse
from mxjax.policy import Rotation
from mxjax.runtime.devices import INTERPRETER, Target, use_target


def check_shard_map() -> None:
    """Parts of a mesh by hand, by the kernels themselves, and a gradient that is summed over them.

    Of the second mesh one axis alone is by hand.
    """
    x = jax.random.normal(jax.random.key(0), (4, 32, 64))
    w = jax.random.normal(jax.random.key(1), (64, 32))

    def loss(x, w):
        return (mxjax.dot(x, w, policy="wgrad_hadamard", implementation="triton") ** 2).sum()

    def of_part(x, w):
        return lax.psum(loss(x, w), "a")

    with use_target(INTERPRETER):
        wanted = jax.jit(jax.grad(loss, (0, 1)))(x, w)
    for shape, names in (((2,), ("a",)), ((2, 2), ("a", "b"))):
        types = (AxisType.Auto,) * len(shape)
        mesh = jax.make_mesh(shape, names, axis_types=types, devices=jax.devices()[: 2 ** len(shape)])
        by_hand = jax.shard_map(of_part, mesh=mesh, in_specs=(P("a"), P()), out_specs=P(), axis_names={"a"})
        with use_target(INTERPRETER):
            got = jax.jit(jax.grad(by_hand, (0, 1)))(x, w)
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)


def main() -> None:
    speed_up()
    check_shard_map()
    quantizer.triton_call = plain_kernels.plain_kernel
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    stochastic = Operand(rounding="stochastic")
    keys = [jax.random.key(i) for i in range(2)]
    inputs = [OperandUse(-1, stochastic, key=keys[0]), OperandUse(-2, stochastic, Rotation(16), key=keys[1])]

    def quantize(x):
        return quantize_operands(x, inputs)

    x = jax.random.normal(jax.random.key(2), (2, 256, 256), jnp.bfloat16)
    with use_target(INTERPRETER):
        wanted = jax.jit(quantize)(x)
        check_definition(wanted, x, inputs)
        for spec in (P(None, "a", "b"), P(None, ("a", "b")), P("b", "a"), P(None, None, "a"), P()):
            check_mesh(quantize, x, NamedSharding(mesh, spec), wanted)
    check_awkward(mesh, quantize)
    check_arrays_of_no_mesh(mesh, quantize, np.asarray(x), wanted)
    check_long_runs(mesh)
    check_block16(mesh)
    check_runs(mesh)
    check_clip(mesh)
    check_matmul(mesh)
    check_explicit()
    check_fp8(mesh)
    check_attention(mesh)
    check_computed(mesh)
    check_cast(mesh)
    check_computed_cast(mesh)
    check_quantiles(mesh)
    print("all equal")


def assert_equal(got, wanted) -> None:
    """Compares trees of arrays bit for bit."""
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(got), jax.tree.leaves(wanted))


def check_definition(got, x, inputs) -> None:
    """Compares one device's bits with the definition's."""
    define = jax.jit(lambda x: [pack_by_definition(x, use) for use in inputs])
    assert_equal([(q.elements, q.scales) for q in got], [(q.elements, q.scales) for q in define(x)])


def check_mesh(quantize, x, sharding, wanted, *, is_placed=True) -> None:
    """Compares with one device's bits; nothing is gathered, and row-wise operands lie where their rows do."""
    x = jax.device_put(x, sharding) if is_placed else x
    compiled = jax.jit(lambda x: quantize(x)).lower(x).compile()
    got = compiled(x)
    assert_equal(got, wanted)
    assert "all-gather" not in compiled.as_text(), sharding
    assert got[0].elements.sharding.is_equivalent_to(sharding, 3)


def check_awkward(mesh, quantize) -> None:
    """Shapes and shardings that do not cut between blocks are gathered where they must be, and right."""
    for shape, spec in (
        ((64, 96), P(None, "b")),
        ((96, 64), P("a", None)),
        ((64, 32), P("a", None)),
        ((40, 72), P("b", "a")),
        ((64, 64), P(("a", "b"), None)),
    ):
        x = jax.random.normal(jax.random.key(3), shape)
        with use_target(INTERPRETER):
            wanted = jax.jit(quantize)(jnp.pad(x, [(0, -n % 32) for n in shape]))
            got = jax.jit(lambda x: quantize(jnp.pad(x, [(0, -n % 32) for n in x.shape])))(
                jax.device_put(x, NamedSharding(mesh, spec))
                if all(n % mesh_size(mesh, axis) == 0 for n, axis in zip(shape, spec, strict=True))
                else x
            )
        assert_equal(got, wanted)


def check_arrays_of_no_mesh(mesh, quantize, x, wanted) -> None:
    """The program knows the mesh that is set from constraints alone, whose axes it shards by."""
    for spec in (P(None, "a", "b"), P(None, ("b", "a"))):
        constrained = functools.partial(lax.with_sharding_constraint, shardings=spec)
        with use_target(INTERPRETER), jax.set_mesh(mesh):
            on_mesh = lambda x, of=constrained: quantize(of(x))  # noqa: E731
            check_mesh(on_mesh, x, NamedSharding(mesh, spec), wanted, is_placed=False)


def check_long_runs(mesh) -> None:
    """A shard has whole runs of H128: where it would have half a run, the axis is gathered."""
    use = OperandUse(-2, Operand(rounding="stochastic"), Rotation(128), key=jax.random.key(10))
    x = jax.random.normal(jax.random.key(11), (512, 8))
    placed = jax.device_put(x, NamedSharding(mesh, P(("a", "b"))))
    with use_target(INTERPRETER):
        got = jax.jit(lambda x: quantize_operands(x, [use]))(placed)
    check_definition(got, x, [use])


def check_block16(mesh) -> None:
    """Each device quantizes its shard with the largest magnitude of all."""
    block16.triton_call = plain_block16
    x = jax.random.normal(jax.random.key(12), (2, 1024, 1024))
    for name in ("nvfp4", "nvfp4_1x128"):
        uses = [OperandUse(axis, Operand(name), Rotation(16)) for axis in (-1, -2)]
        quantize = functools.partial(block16.quantize_block16, uses=uses)
        with use_target(INTERPRETER):
            wanted = jax.jit(quantize)(x)
            largest = wanted[1].tensor_scale if name == "nvfp4" else jnp.max(wanted[1].run_scales)
            np.testing.assert_array_equal(largest, jnp.max(jnp.abs(x)))
            for spec in (P(None, "a", "b"), P("b", "a"), P(None, None, "a")):
                check_mesh(quantize, x, NamedSharding(mesh, spec), wanted)


def check_clip(mesh) -> None:
    """Each device takes the gradient of its shard, in whole blocks."""
    clipped.triton_call = plain_clip
    raw, x = jax.random.normal(jax.random.key(15), (2, 256, 256))
    product = Product(raw, (jnp.arange(256.0), 1 + jnp.arange(256.0)))
    for axis in (-1, -2):
        use = OperandUse(axis, Operand(gradient="clipped"), Rotation(32))
        gradient = jax.jit(functools.partial(clipped.clipped_gradient, use=use, dtype=jnp.float32))
        wanted = gradient(product, x)
        for spec in (P("a", "b"), P(("a", "b")), P(None, "a"), P()):
            sharding = NamedSharding(mesh, spec)
            got = gradient(product._replace(raw=jax.device_put(raw, sharding)), jax.device_put(x, sharding))
            np.testing.assert_array_equal(got, wanted)
            assert got.sharding.is_equivalent_to(sharding, 2)


def check_runs(mesh) -> None:
    """Products of runs are summed over the devices that have them."""
    scaled_blocks.triton_call = plain_kernels.plain_runs
    keys = jax.random.split(jax.random.key(14), 4)
    lhs, rhs = (jax.random.normal(key, (256, 1024), jnp.bfloat16) for key in keys[:2])
    scales = [jnp.exp2(jax.random.randint(key, (8, 256), -3, 4)) for key in keys[2:]]
    multiply = jax.jit(functools.partial(scaled_blocks.matmul, dtype=jnp.float32))
    with use_target(INTERPRETER):
        wanted = multiply(lhs, scales[0], rhs, scales[1])
        for spec in (P("a"), P(None, "a"), P("a", "b"), P(None, ("a", "b"))):
            of_elements = NamedSharding(mesh, spec)
            of_scales = NamedSharding(mesh, P(*(*spec, None)[1::-1]))
            placed = jax.device_put((lhs, scales[0]), (of_elements, of_scales))
            got = multiply(*placed, rhs, scales[1])
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-3)


def mesh_size(mesh, axis) -> int:
    names = axis if isinstance(axis, tuple) else (axis,) if axis else ()
    return int(np.prod([mesh.shape[name] for name in names]))


def check_computed(mesh) -> None:
    """Only rows are cut, and what lies across the others is gathered."""
    quantizer.triton_call = plain_kernels.plain_computed
    keys = iter(jax.random.split(jax.random.key(12), 6))

    def product(r, n):
        factors = tuple(jnp.exp2(jax.random.randint(next(keys), (m,), -3, 4)) for m in (r, n))
        return Product(jax.random.normal(next(keys), (r, n), jnp.bfloat16), factors)

    first, second = product(256, 128), product(256, 64)
    plain = jax.random.normal(jax.random.key(13), (256, 64), jnp.bfloat16)
    for x in (normed(plain, Norm(jnp.arange(64.0), 1e-5)), Gated(first), GatedGradient(first, second)):
        specs = P("a"), P(("a", "b")), P("b", "a"), P(None, "a")
        check_rows(mesh, lambda x: quantize_computed(x, *COMPUTED_INPUTS), x, specs)


def check_rows(mesh, quantize, x, specs) -> None:
    """Compares with one device's bits; only what lies across other axes than rows is gathered."""

    def whole(tree):
        return [np.asarray(t, np.float32) if t.dtype.itemsize == 1 else t for t in jax.tree.leaves(tree)]

    wanted = jax.jit(quantize)(x)
    for spec in specs:

        def place(t, spec=spec):
            rows = t.shape[0] == 256
            axes = spec if t.ndim == 2 else P(spec[0]) if rows else P(*spec[1:])
            return jax.device_put(t, NamedSharding(mesh, axes))

        placed = jax.tree.map(place, x)
        compiled = jax.jit(lambda x: quantize(x)).lower(placed).compile()
        got = compiled(placed)
        assert_equal(whole(got), whole(wanted))
        assert ("all-gather" in compiled.as_text()) == (len(spec) > 1), spec
        assert got[0].elements.sharding.is_equivalent_to(NamedSharding(mesh, P(spec[0])), 2)


def delayed_uses(scales):
    """Returns uses of both axes by delayed scales."""
    operand = Operand("fp8_e4m3", scaling="delayed")
    return [OperandUse(-1 - i, operand, scale=scales[i]) for i in range(2)]


def check_cast(mesh) -> None:
    """Each device casts its shard, and with delayed scales finds the largest magnitude of all."""
    fp8.triton_call = plain_cast
    current = [OperandUse(axis, Operand("fp8_e4m3")) for axis in (-1, -2)]
    x = jax.random.normal(jax.random.key(14), (2, 256, 256))
    for uses in (current, delayed_uses(jnp.array([20.0, 7.0]))):

        def quantize(x, uses=uses):
            return fp8.quantize_fp8(x, uses)

        with use_target(Target("cuda", "sm_90")):
            wanted = jax.jit(quantize)(x)
            assert uses is current or wanted[0].amax == wanted[1].amax == jnp.max(jnp.abs(x))
            for spec in (P(None, "a", "b"), P("b", "a"), P(None, None, "a")):
                check_mesh(quantize, x, NamedSharding(mesh, spec), wanted)


def check_quantiles(mesh) -> None:
    """Each device finds those of its tokens, whose elements are gathered if the mesh shards them."""
    quantiles.triton_call = plain_kernels.plain_quantiles
    find = jax.jit(functools.partial(quantiles.quantiles, quantile=0.98))
    x = jax.random.normal(jax.random.key(16), (2, 64, 256), jnp.bfloat16)
    wanted = split.quantiles(x, 0.98)
    for spec in (P("b", "a"), P(None, ("a", "b")), P(None, "a", "b"), P()):
        got = find(jax.device_put(x, NamedSharding(mesh, spec)))
        assert_equal(got, wanted)
        assert got.lower.sharding.is_equivalent_to(NamedSharding(mesh, P(*spec[:2])), 3), spec


def check_computed_cast(mesh) -> None:
    """As `check_computed`."""
    fp8_computed.triton_call = plain_kernels.plain_computed_cast
    keys = iter(jax.random.split(jax.random.key(15), 3))
    first, second, plain = (jax.random.normal(next(keys), (256, n), jnp.bfloat16) for n in (128, 64, 64))
    product, gradient = (Product(t, (jnp.array([0.5]), jnp.array([2.0]))) for t in (first, second))

    def quantize(x):
        return fp8_computed.quantize_fp8_computed(x, *delayed_uses(jnp.array([20.0, 7.0])))

    for x in (normed(plain, Norm(jnp.arange(64.0), 1e-5)), Gated(product), GatedGradient(product, gradient)):
        with use_target(Target("cuda", "sm_90")):
            check_rows(mesh, quantize, x, (P("a"), P(("a", "b"))))


multiply_on_one = jax.jit(plain_product, static_argnums=(4, 5))


def check_matmul(mesh) -> None:
    """However its operands are cut, K too, and by one mesh axis twice."""
    fp4_gemm.launch = plain_product
    fp4_gemm._matmul.cache_clear()  # its functions hold the kernel's launch
    for k, cuts in ((256, ("a", "b", None)), (32, (None, "a")), (96, (None, "b"))):
        keys = jax.random.split(jax.random.key(4), 2)
        lhs, rhs = (
            quantize_plain(jax.random.normal(key, (n, k))) for key, n in zip(keys, (64, 96), strict=True)
        )
        wanted = multiply_on_one(*(t[None] for t in (*lhs, *rhs)), jnp.float32, None)[0]
        for rows in ("a", None):
            for cut in cuts:
                if cut == rows and cut is not None:
                    continue
                placed = [
                    jax.device_put(t, NamedSharding(mesh, P(rows, cut if t.shape[1] % 8 == 0 else None)))
                    for t in (*lhs, *rhs)
                ]
                got = jax.jit(lambda *t: fp4_gemm.matmul(*t, dtype=jnp.float32))(*placed)
                np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def check_explicit() -> None:
    """`dot` by both kernels, on a mesh whose axes are in the types of its arrays."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    x = jax.random.normal(jax.random.key(6), (8, 32, 128))
    w = jax.random.normal(jax.random.key(7), (128, 64))

    def gradients(x, w, key):
        def loss(x, w):
            return (mxjax.dot(x, w, policy="full_sr", key=key, implementation="triton") ** 2).sum()

        return jax.grad(loss, (0, 1))(x, w)

    with use_target(INTERPRETER):
        wanted = jax.jit(gradients)(x, w, keys := jax.random.key(8))
        with jax.set_mesh(mesh):
            for left, right in ((P("a"), P(None, "b")), (P("b", "a"), P("a", None))):
                placed = jax.device_put(x, P(*left)), jax.device_put(w, P(*right))
                compiled = jax.jit(gradients).lower(*placed, keys).compile()
                for got, one, like in zip(compiled(*placed, keys), wanted, placed, strict=True):
                    assert got.sharding.is_equivalent_to(like.sharding, got.ndim)
                    np.testing.assert_allclose(got, one, rtol=1e-4, atol=1e-4)


def check_fp8(mesh) -> None:
    """As `check_matmul`, where elements are lost too; what is gathered is packed, or a factor a row."""
    fp8_matmul.carry_operands, fp8_matmul.correct = plain_carry, plain_kernels.plain_correct
    keys = jax.random.split(jax.random.key(5), 2)
    x, w = jax.random.normal(keys[0], (64, 256)), jax.random.normal(keys[1], (96, 256))

    def multiply(*operands):
        return fp8_matmul.matmul(*operands, jnp.float32, ("e4m3", "e5m2")).value(jnp.float32)

    for left, right, out in (
        (P("a"), P("a"), P("a")),
        (P("a"), P(None, "a"), P("a")),
        (P(None, "a"), P("b", "a"), P(None, "b")),
        (P(), P("b"), P(None, "b")),
    ):
        compiled = None
        for span in (0, 40):
            lhs = quantize_plain(x * jnp.exp2(jnp.round(jnp.linspace(-span, 0, 256))))
            rhs = quantize_plain(w)
            wanted = multiply_on_one(*(t[None] for t in (*lhs, *rhs)), jnp.float32, None)[0]
            placed = [jax.device_put(t, NamedSharding(mesh, left)) for t in lhs]
            placed += [jax.device_put(t, NamedSharding(mesh, right)) for t in rhs]
            run = jax.jit(multiply, out_shardings=NamedSharding(mesh, out))
            compiled = compiled or run.lower(*placed).compile()
            np.testing.assert_allclose(compiled(*placed), wanted, rtol=1e-5, atol=1e-5)
            gathered = re.findall(r"= \(?(\w+\[[\d,]*\]).* all-gather(?:-start)?\(", compiled.as_text())
            # Four bytes a column besides, where one axis of the mesh cuts rows and columns.
            factors = ["f32[96]"] if left == right else []
            assert [t for t in gathered if not t.startswith("u8[")] == factors, gathered


@jax.jit
def quantize_plain(x):
    q = pack_by_definition(x, OperandUse(-1))
    return q.elements, q.scales


if __name__ == "__main__":
    main()
