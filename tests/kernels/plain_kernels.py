"""Launches of the kernels in jax.numpy, for `partitioned.py`, which compares how tensors are cut."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import mxjax
from mxjax.kernels.quantize import block16, fp8_computed
from mxjax.kernels.quantize.hopper import quantize_normed_kernel
from mxjax.numerics.array import float4_codes, pack_codes
from mxjax.numerics.formats import E2M1
from mxjax.numerics.philox import philox_4x32
from mxjax.numerics.rounding import stochastic_round
from mxjax.numerics.scales import block_scale, divide_by_scale
from mxjax.operands.carriers import Carried, carry
from mxjax.operands.computed import Gated, GatedGradient, Normed
from mxjax.operands.kernel_operand import KernelOperand, decode, pack_by_definition, values_of_runs
from mxjax.operands.product import Product
from mxjax.operands.use import OperandUse
from mxjax.policy import Rotation


def _signs():
    return jnp.where(jnp.arange(16) % 3 == 0, 1.0, -1.0)


COMPUTED_INPUTS = OperandUse(-1), OperandUse(-2, rotation=Rotation(16, signs="redrawn"), signs=_signs())


def plain_kernel(kernel, x, scalars, *, out, **constants):
    """Quantizes [1, b, r, c] as the kernel does, packed with stochastic rounding, by jax.numpy."""
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


def plain_block16(kernel, x, maxima, *_, out, **constants):
    """Writes tiles' maxima, and x itself in bfloat16 as operands, in place of the kernels of `block16`.

    Scales are the largest magnitudes of the tensor, or of runs.
    """
    if kernel is block16.largest_kernel:
        tiles = np.divmod(x.shape[2:], out[0].shape[2:])[0]
        shape = (*x.shape[:2], out[0].shape[2], tiles[0], out[0].shape[3], tiles[1])
        return [lax.bitcast_convert_type(jnp.max(jnp.abs(x).reshape(shape), (3, 5)), jnp.int32)] * 2
    written = []
    for i, t in enumerate((x, x.swapaxes(-1, -2))):
        of_words, of_scales = out[2 * i : 2 * i + 2]
        words = t.astype(jnp.bfloat16).reshape(*of_words.shape, 2)
        runs = jnp.max(jnp.abs(t).reshape(*t.shape[:-1], -1, 128), axis=-1).swapaxes(-1, -2)
        whole = lax.bitcast_convert_type(maxima[:, i], jnp.float32)
        written += [lax.bitcast_convert_type(words, jnp.int32), runs if len(of_scales.shape) > 1 else whole]
    return written


def plain_computed(kernel, *arrays, out, **_):
    """Quantizes a norm's or SwiGLU's result, or its gradient, as Hopper's kernels do, by jax.numpy."""
    *arrays, _ = arrays  # the signs' word
    products = [Product(arrays[i], arrays[i + 1 : i + 3]) for i in range(0, len(arrays), 3)]
    kind = Gated if len(products) == 1 else GatedGradient
    values = (Normed(*arrays) if kernel is quantize_normed_kernel else kind(*products)).value()
    written = []
    for use in COMPUTED_INPUTS:
        q = pack_by_definition(values, use._replace(signs=_signs() if use.has_signs else None))
        words = q.elements.reshape(*q.elements.shape[:-1], -1, 4)
        written += [lax.bitcast_convert_type(words, jnp.int32), q.scales]
    return written


def plain_product(lhs, lhs_scales, rhs, rhs_scales, dtype, target, tiles=None):
    """Multiplies as the GEMM kernel does, by jax.numpy."""
    left, right = decode(KernelOperand(lhs, lhs_scales)), decode(KernelOperand(rhs, rhs_scales))
    return jnp.einsum("bmk,bnk->bmn", left, right, preferred_element_type=jnp.float32).astype(dtype)


def plain_runs(kernel, *operands, out, **_):
    """Multiplies as the kernel for scales of runs does, by jax.numpy."""
    left, right = (
        values_of_runs(KernelOperand(elements, None, run_scales=scales))
        for elements, scales in zip(operands[::2], operands[1::2], strict=True)
    )
    return [jnp.einsum("bmk,bnk->bmn", left, right, precision="highest").astype(out[0].dtype)]


def plain_clip(kernel, raw, x, row_factors, column_factors, *, out, **_):
    """Returns what the kernel that clips gradients reads in each place: all of it counts."""
    y = raw * (row_factors[..., :, None] * column_factors[..., None, :])
    return [(y + x).astype(out[0].dtype)]


def plain_carry(lhs, rhs, carriers, target, grouped):
    """Carries both operands as the carrier kernel does, by the definition, with one flag a batch."""
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


def plain_scores(q, k, first_key):
    scores = jnp.einsum("bsgrh,btgh->bgrst", q, k) * q.shape[-1] ** -0.5
    seen = jnp.tri(q.shape[1], dtype=bool)[None]
    if first_key is not None:
        seen = seen & (first_key[:, :, None] <= jnp.arange(q.shape[1])[None, None])
    return jnp.where(seen[:, None, None], scores, -jnp.inf)


def plain_attention(q, k, v, target, first_key=None, sinks=None):
    """Attends as the forward kernel does, by jax.numpy."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    scores = plain_scores(q, k, first_key)
    lse = jax.nn.logsumexp(scores, axis=-1)
    if sinks is not None:
        lse = jnp.logaddexp(lse, sinks[..., None])
    out = jnp.einsum("bgrst,btgh->bsgrh", jnp.exp(scores - lse[..., None]), v)
    return out.astype(jnp.bfloat16), lse


def plain_gradients(q, k, v, out, lse, dout, target, first_key=None, sinks=None):
    """Computes the gradients as the backward kernels do, by jax.numpy, and reads all that they read."""
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


def plain_cast(kernel, x, rows, columns, *, out, **constants):
    """Casts as the kernel does, by jax.numpy, with the largest magnitude of all for every tile."""
    x, written = x.astype(jnp.float32), []
    for name, t, factor in (("ROW", x, rows), ("COLUMN", x.swapaxes(1, 2), columns)):
        dtype = jnp.float8_e5m2 if constants[f"{name}_E5M2"] else jnp.float8_e4m3fn
        elements = (t * factor[:, None, None]).astype(dtype)
        written.append(lax.bitcast_convert_type(elements.reshape(*t.shape[:2], -1, 4), jnp.int32))
    amax = lax.bitcast_convert_type(jnp.max(jnp.abs(x), (1, 2), keepdims=True), jnp.int32)
    return [*written, jnp.broadcast_to(amax, out[2].shape) if constants["MAXIMA"] else amax]


def plain_quantiles(kernel, x, *, K, SMALLEST, LARGEST, **_):
    """Finds quantiles as the kernel does, by jax.numpy."""
    ordered = jnp.sort(x, axis=-1)
    return [ordered[..., SMALLEST - 1], ordered[..., K - LARGEST]]


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
