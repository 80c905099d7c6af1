"""Run by test_mesh.py on 8 virtual devices: the quantizer on meshes, with a jax.numpy kernel.

Callbacks cannot run inside a partitioned function, so Triton's interpreter cannot but in shard_map. What is
tested is how tensors are cut up, and that random bits go by the position in the whole.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mxjax
from mxjax.kernels.attention import launches
from mxjax.kernels.attention.fused import fused_attention
from mxjax.kernels.matmul import fp4_gemm, fp8_matmul
from mxjax.kernels.quantize import block16, fp8, fp8_computed, quantizer
from mxjax.kernels.quantize import quantizer as computed
from mxjax.kernels.quantize.hopper import quantize_normed_kernel
from mxjax.kernels.quantize.quantizer import quantize_computed, quantize_operands
from mxjax.numerics.array import float4_codes, pack_codes
from mxjax.numerics.formats import E2M1
from mxjax.numerics.operand import Operand
from mxjax.numerics.philox import philox_4x32
from mxjax.numerics.rounding import stochastic_round
from mxjax.numerics.scales import block_scale, divide_by_scale
from mxjax.operands.carriers import Carried, carry
from mxjax.operands.computed import Gated, GatedGradient, Norm, Normed, normed
from mxjax.operands.kernel_operand import KernelOperand, decode, pack_by_definition
from mxjax.operands.product import Product
from mxjax.operands.use import OperandUse
from mxjax.policy import Rotation
from mxjax.runtime.devices import INTERPRETER, Target, use_target

COMPUTED_INPUTS = OperandUse(-1), OperandUse(-2, rotation=Rotation(16))


def plain_kernel(kernel, x, scalars, *, out, **constants):
    """Quantizes [1, b, r, c] as the kernel does, packed with stochastic rounding, by jax.numpy."""
    del kernel
    scalars = scalars[0]
    written = []
    for name, t, first, other in (("ROW", x[0], 14, 13), ("COLUMN", x[0].swapaxes(1, 2), 13, 14)):
        if not constants[f"{name}_FORM"]:
            written += [jnp.zeros(o.shape, o.dtype) for o in out[len(written) : len(written) + 2]]
            continue
        b, n, k = t.shape
        t = t.astype(jnp.float32)
        if constants[f"{name}_ROTATION"] > 1:
            t = mxjax.rotate(t, constants[f"{name}_ROTATION"])
        byte = block_scale(jnp.max(jnp.abs(t.reshape(b, n, k // 32, 32)), axis=-1))
        scaled = divide_by_scale(t, jnp.repeat(byte.astype(jnp.int32), 32, axis=-1))
        whole = constants["R_ALL" if name == "ROW" else "C_ALL"]
        batches = (scalars[12] + jnp.arange(b, dtype=jnp.uint32))[:, None]
        row = (batches * jnp.uint32(whole) + scalars[other] + jnp.arange(n, dtype=jnp.uint32))[..., None]
        counter = scalars[first] // 8 + jnp.arange(k // 8, dtype=jnp.uint32)
        zero = jnp.zeros((b, n, k // 8), jnp.uint32)
        key = scalars[0:2] if name == "ROW" else scalars[6:8]
        words = philox_4x32((zero + counter, zero + row, zero, zero), (key[0], key[1]))
        halves = jnp.stack([h for w in words for h in (w & 0xFFFF, w >> 16)], axis=-1).reshape(b, n, k)
        codes = float4_codes(stochastic_round(scaled, E2M1, halves.astype(jnp.uint16)))
        packed = pack_codes(codes, 2).reshape(1, b, n, k // 8, 4)
        written += [lax.bitcast_convert_type(packed, jnp.int32), byte[None]]
    return written


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
    for shape, names in (((4,), ("a",)), ((2, 2), ("a", "b"))):
        types = (AxisType.Auto,) * len(shape)
        mesh = jax.make_mesh(shape, names, axis_types=types, devices=jax.devices()[:4])
        by_hand = jax.shard_map(of_part, mesh=mesh, in_specs=(P("a"), P()), out_specs=P(), axis_names={"a"})
        with use_target(INTERPRETER):
            got = jax.jit(jax.grad(by_hand, (0, 1)))(x, w)
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)


def main() -> None:
    check_shard_map()
    quantizer.triton_call = plain_kernel
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    stochastic = Operand(rounding="stochastic")
    keys = [jax.random.key(i) for i in range(2)]
    inputs = [
        OperandUse(-1, stochastic, key=keys[0]),
        OperandUse(-2, stochastic, Rotation(16), key=keys[1]),
    ]

    def quantize(x):
        return quantize_operands(x, inputs)

    x = jax.random.normal(jax.random.key(2), (2, 256, 256), jnp.bfloat16)
    with use_target(INTERPRETER):
        wanted = jax.jit(quantize)(x)
        check_definition(wanted, x, inputs)
        for spec in (P(None, "a", "b"), P(None, ("a", "b")), P("b", "a"), P(None, None, "a"), P()):
            check_mesh(quantize, x, NamedSharding(mesh, spec), wanted)
    check_awkward(mesh, quantize)
    check_long_runs(mesh)
    check_block16(mesh)
    check_matmul(mesh)
    check_explicit()
    check_fp8(mesh)
    check_attention(mesh)
    check_computed(mesh)
    check_cast(mesh)
    check_computed_cast(mesh)
    print("all equal")


def check_definition(got, x, inputs) -> None:
    """Compares one device's bits with the definition's."""
    define = jax.jit(lambda x: [pack_by_definition(x, use) for use in inputs])
    for q, wanted in zip(got, define(x), strict=True):
        np.testing.assert_array_equal(q.elements, wanted.elements)
        np.testing.assert_array_equal(q.scales, wanted.scales)


def check_mesh(quantize, x, sharding, wanted) -> None:
    """Compares with one device's bits; nothing is gathered, and row-wise operands lie where their rows do."""
    x = jax.device_put(x, sharding)
    compiled = jax.jit(lambda x: quantize(x)).lower(x).compile()
    got = compiled(x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)
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
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(a, b)


def check_long_runs(mesh) -> None:
    """A shard has whole runs of H128: where it would have half a run, the axis is gathered."""
    use = OperandUse(-2, Operand(rounding="stochastic"), Rotation(128), key=jax.random.key(10))
    x = jax.random.normal(jax.random.key(11), (512, 8))
    placed = jax.device_put(x, NamedSharding(mesh, P(("a", "b"))))
    with use_target(INTERPRETER):
        got = jax.jit(lambda x: quantize_operands(x, [use]))(placed)
    check_definition(got, x, [use])


def plain_block16(kernel, x, maxima, *_, out, **constants):
    """Writes tiles' maxima, and x itself in bfloat16 as operands, in place of the kernels of `block16`."""
    del constants
    if kernel is block16.largest_kernel:
        tiles = np.divmod(x.shape[2:], out[0].shape[2:])[0]
        shape = (*x.shape[:2], out[0].shape[2], tiles[0], out[0].shape[3], tiles[1])
        return [lax.bitcast_convert_type(jnp.max(jnp.abs(x).reshape(shape), (3, 5)), jnp.int32)] * 2
    values = x.astype(jnp.bfloat16)
    words = [
        lax.bitcast_convert_type(t.reshape(*o.shape, 2), jnp.int32)
        for t, o in zip((values, values.swapaxes(-1, -2)), out, strict=False)
    ]
    return [*words, lax.bitcast_convert_type(maxima, jnp.float32)]


def check_block16(mesh) -> None:
    """Each device quantizes its shard with the largest magnitude of all."""
    block16.triton_call = plain_block16
    uses = [OperandUse(axis, Operand("nvfp4"), Rotation(16)) for axis in (-1, -2)]

    def quantize(x):
        return block16.quantize_block16(x, uses)

    x = jax.random.normal(jax.random.key(12), (2, 512, 512))
    with use_target(INTERPRETER):
        wanted = jax.jit(quantize)(x)
        np.testing.assert_array_equal(wanted[1].tensor_scale, jnp.max(jnp.abs(x)))
        for spec in (P(None, "a", "b"), P(None, ("a", "b")), P("b", "a"), P(None, None, "a"), P()):
            check_mesh(quantize, x, NamedSharding(mesh, spec), wanted)


def mesh_size(mesh, axis) -> int:
    names = axis if isinstance(axis, tuple) else (axis,) if axis else ()
    return int(np.prod([mesh.shape[name] for name in names]))


def plain_computed(kernel, *arrays, out, **_):
    """Quantizes a norm's or SwiGLU's result, or its gradient, as Hopper's kernels do, by jax.numpy."""
    del out
    products = [Product(arrays[i], arrays[i + 1 : i + 3]) for i in range(0, len(arrays), 3)]
    kind = Gated if len(products) == 1 else GatedGradient
    values = (Normed(*arrays) if kernel is quantize_normed_kernel else kind(*products)).value()
    written = []
    for use in COMPUTED_INPUTS:
        q = pack_by_definition(values, use)
        words = q.elements.reshape(*q.elements.shape[:-1], -1, 4)
        written += [lax.bitcast_convert_type(words, jnp.int32), q.scales]
    return written


def check_computed(mesh) -> None:
    """Only rows are cut, and what lies across the others is gathered."""
    computed.triton_call = plain_computed
    keys = iter(jax.random.split(jax.random.key(12), 6))

    def product(r, n):
        factors = tuple(jnp.exp2(jax.random.randint(next(keys), (m,), -3, 4)) for m in (r, n))
        return Product(jax.random.normal(next(keys), (r, n), jnp.bfloat16), factors)

    first, second = product(256, 128), product(256, 64)
    plain = jax.random.normal(jax.random.key(13), (256, 64), jnp.bfloat16)
    for x in (normed(plain, Norm(jnp.arange(64.0), 1e-5)), Gated(first), GatedGradient(first, second)):
        wanted = jax.jit(lambda x: quantize_computed(x, *COMPUTED_INPUTS))(x)
        for spec in (P("a"), P(("a", "b")), P("b", "a"), P(None, "a")):

            def place(t, spec=spec):
                rows = t.shape[0] == 256
                axes = spec if t.ndim == 2 else P(spec[0]) if rows else P(*spec[1:])
                return jax.device_put(t, NamedSharding(mesh, axes))

            compiled = (
                jax.jit(lambda x: quantize_computed(x, *COMPUTED_INPUTS))
                .lower(jax.tree.map(place, x))
                .compile()
            )
            got = compiled(jax.tree.map(place, x))
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
                np.testing.assert_array_equal(a, b)
            assert ("all-gather" in compiled.as_text()) == (len(spec) > 1), spec
            assert got[0].elements.sharding.is_equivalent_to(NamedSharding(mesh, P(spec[0])), 2)


def plain_cast(kernel, x, rows, columns, *, out, **constants):
    """Casts as the kernel does, by jax.numpy, with the largest magnitude of all for every tile."""
    del kernel
    x, written = x.astype(jnp.float32), []
    for name, t, factor in (("ROW", x, rows), ("COLUMN", x.swapaxes(1, 2), columns)):
        dtype = jnp.float8_e5m2 if constants[f"{name}_E5M2"] else jnp.float8_e4m3fn
        elements = (t * factor[:, None, None]).astype(dtype)
        written.append(lax.bitcast_convert_type(elements.reshape(*t.shape[:2], -1, 4), jnp.int32))
    amax = lax.bitcast_convert_type(jnp.max(jnp.abs(x), (1, 2), keepdims=True), jnp.int32)
    return [*written, jnp.broadcast_to(amax, out[2].shape) if constants["MAXIMA"] else amax]


def plain_computed_cast(kernel, *arrays, out, **constants):
    """Casts what the kernel computes, by jax.numpy."""
    *arrays, rows, columns = arrays
    if kernel is fp8_computed.KERNELS["normed"]:
        values = Normed(arrays[0], arrays[1], jnp.broadcast_to(arrays[2], arrays[0].shape)).value()
    else:
        products = [
            arrays[i] * arrays[i + 1][:, None, None].astype(jnp.bfloat16) for i in range(0, len(arrays), 2)
        ]
        kind = Gated if len(products) == 1 else GatedGradient
        values = kind(*map(Product, products)).value()
    return plain_cast(kernel, values, rows, columns, out=out, **constants)


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
            for spec in (P(None, "a", "b"), P(None, ("a", "b")), P("b", "a"), P(None, None, "a"), P()):
                check_mesh(quantize, x, NamedSharding(mesh, spec), wanted)


def check_computed_cast(mesh) -> None:
    """As `check_computed`."""
    fp8_computed.triton_call = plain_computed_cast
    keys = iter(jax.random.split(jax.random.key(15), 3))
    first, second, plain = (jax.random.normal(next(keys), (256, n), jnp.bfloat16) for n in (128, 64, 64))
    product, gradient = (Product(t, (jnp.array([0.5]), jnp.array([2.0]))) for t in (first, second))

    def quantize(x):
        return fp8_computed.quantize_fp8_computed(x, *delayed_uses(jnp.array([20.0, 7.0])))

    for x in (normed(plain, Norm(jnp.arange(64.0), 1e-5)), Gated(product), GatedGradient(product, gradient)):
        with use_target(Target("cuda", "sm_90")):
            wanted = jax.jit(quantize)(x)
            for spec in (P("a"), P(("a", "b"))):

                def place(t, spec=spec):
                    return jax.device_put(t, NamedSharding(mesh, spec if t.shape[0] == 256 else P()))

                compiled = jax.jit(quantize).lower(jax.tree.map(place, x)).compile()
                got = compiled(jax.tree.map(place, x))
                for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
                    np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
                assert "all-gather" not in compiled.as_text(), spec
                assert got[0].elements.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)


def plain_product(lhs, lhs_scales, rhs, rhs_scales, dtype, target, tiles=None):
    """Multiplies as the GEMM kernel does, by jax.numpy."""
    del target
    left, right = decode(KernelOperand(lhs, lhs_scales)), decode(KernelOperand(rhs, rhs_scales))
    return jnp.einsum("bmk,bnk->bmn", left, right, preferred_element_type=jnp.float32).astype(dtype)


multiply_on_one = jax.jit(plain_product, static_argnums=(4, 5))


def check_matmul(mesh) -> None:
    """However its operands are cut, K too, and by one mesh axis twice."""
    fp4_gemm.launch = plain_product
    for k, cuts in ((256, ("a", "b", None)), (32, (None, "a")), (96, (None, "b"))):
        keys = jax.random.split(jax.random.key(4), 2)
        lhs, rhs = (
            quantize_plain(jax.random.normal(key, (n, k))) for key, n in zip(keys, (64, 96), strict=True)
        )
        wanted = multiply_on_one(*(t[None] for t in (*lhs, *rhs)), jnp.float32, None)[0]
        for rows in ("a", "b", None):
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


def plain_carry(lhs, rhs, carriers, target, grouped):
    """Carries both operands as the carrier kernel does, by the definition, with one flag a batch."""
    del target, grouped
    carried = []
    for operand, carrier in zip((lhs, rhs), carriers, strict=True):
        rows = [carry(KernelOperand(*q), carrier) for q in zip(*operand, strict=True)]
        q = jax.tree.map(lambda *t: jnp.stack(t), *rows)
        carried.append(Carried(q.elements, q.unit, jnp.max(q.lost, axis=1, keepdims=True)))
    return carried


def plain_correct(y, operands, left, right, target):
    """Corrects as `fp8_matmul.correct` does, by jax.numpy, with one strip a batch."""
    exponents = [rows.unit.astype(jnp.int32) - 127 for rows in (left, right)]
    exponent = exponents[0][:, :, None] + exponents[1][:, None, :]
    product = jnp.ldexp(plain_product(*operands, jnp.float32, target), -exponent).astype(y.dtype)
    lost = jnp.any(left.lost, axis=1) | jnp.any(right.lost, axis=1)
    factors = [jnp.exp2(e) for e in exponents]
    return [jnp.where(lost[:, None, None], product, y), *factors]


def check_fp8(mesh) -> None:
    """As `check_matmul`, where elements are lost too; what is gathered is packed, or a factor a row."""
    fp8_matmul.carry_operands, fp8_matmul.correct = plain_carry, plain_correct
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


def plain_scores(q, k, first_key):
    scores = jnp.einsum("bsgrh,btgh->bgrst", q, k) * q.shape[-1] ** -0.5
    seen = jnp.tri(q.shape[1], dtype=bool)[None]
    if first_key is not None:
        seen = seen & (first_key[:, :, None] <= jnp.arange(q.shape[1])[None, None])
    return jnp.where(seen[:, None, None], scores, -jnp.inf)


def plain_attention(q, k, v, target, first_key=None, sinks=None):
    """Attends as the forward kernel does, by jax.numpy."""
    del target
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    scores = plain_scores(q, k, first_key)
    lse = jax.nn.logsumexp(scores, axis=-1)
    if sinks is not None:
        lse = jnp.logaddexp(lse, sinks[..., None])
    out = jnp.einsum("bgrst,btgh->bsgrh", jnp.exp(scores - lse[..., None]), v)
    return out.astype(jnp.bfloat16), lse


def plain_gradients(q, k, v, out, lse, dout, target, first_key=None, sinks=None):
    """Computes the gradients as the backward kernels do, by jax.numpy, and reads all that they read."""
    del target
    q, k, v, out, dout = (x.astype(jnp.float32) for x in (q, k, v, out, dout))
    weights = jnp.exp(plain_scores(q, k, first_key) - lse[..., None])
    delta = jnp.einsum("bsgrh,bsgrh->bgrs", out, dout)
    d_scores = weights * (jnp.einsum("bsgrh,btgh->bgrst", dout, v) - delta[..., None]) * q.shape[-1] ** -0.5
    dq = jnp.einsum("bgrst,btgh->bsgrh", d_scores, k)
    dk = jnp.einsum("bgrst,bsgrh->btgh", d_scores, q)
    dv = jnp.einsum("bgrst,bsgrh->btgh", weights, dout)
    gradients = tuple(x.astype(jnp.bfloat16) for x in (dq, dk, dv))
    if sinks is None:
        return gradients
    return *gradients, -jnp.sum(jnp.exp(sinks[..., None] - lse) * delta, axis=-1)


def check_attention(mesh) -> None:
    """Batch and heads are sharded without a gather; also under shard_map and with Explicit axes."""
    launches.forward, launches.backward = plain_attention, plain_gradients
    keys = jax.random.split(jax.random.key(9), 4)
    q, dy = (jax.random.normal(key, (8, 6, 8, 64), jnp.bfloat16) for key in keys[:2])
    k, v = (jax.random.normal(key, (8, 6, 4, 64), jnp.bfloat16) for key in keys[2:])

    def attend(q, k, v, dy):
        out, vjp = jax.vjp(fused_attention, q, k, v)
        return out, *vjp(dy)

    wanted = jax.jit(attend)(q, k, v, dy)
    for spec in (P("b", None, "a"), P("a", "b")):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in (q, k, v, dy)]
        compiled = jax.jit(lambda *arrays: attend(*arrays)).lower(*placed).compile()
        compare(compiled(*placed), wanted)
        assert ("all-gather" in compiled.as_text()) == (spec == P("a", "b")), spec
    # More parts than heads of keys: these are gathered.
    placed = [jax.device_put(x, NamedSharding(mesh, P(None, None, ("a", "b")))) for x in (q, dy)]
    compare(jax.jit(lambda q, dy: attend(q, k, v, dy))(*placed), wanted)
    by_hand = jax.shard_map(attend, mesh=mesh, in_specs=P("b", None, "a"), out_specs=P("b", None, "a"))
    compare(jax.jit(by_hand)(q, k, v, dy), wanted)
    with jax.set_mesh(jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)):
        placed = [jax.device_put(x, P("b", None, "a")) for x in (q, k, v, dy)]
        got = jax.jit(attend)(*placed)
        compare(got, wanted)
        assert all(x.sharding.is_equivalent_to(placed[0].sharding, 4) for x in got)
    check_masked_attention(mesh, q, k, v, dy)


def check_masked_attention(mesh, q, k, v, dy) -> None:
    """Masks and sinks are sharded with the batch and the heads."""
    sinks = jnp.linspace(-1, 1, 8)
    begin, position = jnp.arange(8)[:, None] % 3, jnp.arange(6)[None]  # of a second document
    first_key = jnp.maximum(jnp.where(position >= begin, begin, 0), position - 2)

    def attend(q, k, v, dy, first_key, sinks):
        out, vjp = jax.vjp(
            lambda *x: fused_attention(*x[:3], first_key=first_key, sinks=x[3]), q, k, v, sinks
        )
        return out, *vjp(dy)

    wanted = jax.jit(attend)(q, k, v, dy, first_key, sinks)
    specs = (*[P("b", None, "a")] * 4, P("b"), P("a"))
    arrays = zip((q, k, v, dy, first_key, sinks), specs, strict=True)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in arrays]
    compiled = jax.jit(lambda *arrays: attend(*arrays)).lower(*placed).compile()
    compare(compiled(*placed), wanted)
    assert "all-gather" not in compiled.as_text()


def compare(got, wanted) -> None:
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=0.02, atol=0.02)


@jax.jit
def quantize_plain(x):
    q = pack_by_definition(x, OperandUse(-1))
    return q.elements, q.scales


if __name__ == "__main__":
    main()
