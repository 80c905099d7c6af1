"""Wgrad's error under several roundings, rotations and scale rules, on the same tensors."""

import functools
import math
import types
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from analysis.diagnose.capture import Gradients, Pass
from analysis.diagnose.measures import weight_gradient
from analysis.diagnose.split import Grams
from mxjax.numerics.operand import Operand
from mxjax.numerics.scales import ScaleRule
from mxjax.policy import Gemm, Rotation
from mxjax.products.implementations import compiler_options
from mxjax.recipes import get_policy

Products = tuple[Float32[Array, "batches batches"], ...]
"""`Grams` in float32, on the device."""

RULES: tuple[ScaleRule, ...] = ("floor", "even", "rceil")


def _variants() -> dict[str, Gemm]:
    found = {}
    for rule in RULES:
        nearest = Operand(scale_rule=rule)
        stochastic = Operand(scale_rule=rule, rounding="stochastic")
        found[f"nearest {rule}"] = Gemm(nearest, nearest)
        found[f"stochastic {rule}"] = Gemm(stochastic, stochastic)
        found[f"redrawn signs {rule}"] = Gemm(nearest, nearest, Rotation(16, "redrawn"))
        found[f"H16 {rule}"] = Gemm(nearest, nearest, Rotation(16))
    return found


VARIANTS: Mapping[str, Gemm] = types.MappingProxyType(_variants())
"""The GEMMs to compare: both operands in MXFP4, by name."""


def wgrad_grams(
    passes: Sequence[Pass], key: jax.Array, variants: Mapping[str, Gemm] = VARIANTS
) -> dict[str, dict[str, Grams]]:
    """Returns the inner products of Wgrad's errors, by variant and layer ("blocks.0.attention.qkv").

    The tensors are those of the passes, so that the variants differ in Wgrad alone. Random bits differ from
    batch to batch.
    """
    found: dict[str, dict[str, Grams]] = {name: {} for name in variants}
    keys = jax.random.split(key, len(passes))
    for name in passes[0].tensors:
        of_layer = _layer_grams(tuple(variants.values()))
        for i in range(len(passes[0].gradients[name])):
            sides = zip(*(p.tensors[name] for p in passes), strict=True)
            x, dy = (jnp.stack([t[i].reshape(-1, t.shape[-1]) for t in side]) for side in sides)
            for variant, grams in zip(variants, of_layer(x, dy, keys), strict=True):
                found[variant][f"blocks.{i}.{name}"] = _on_host(grams)
    return found


def gradient_grams(found: Sequence[Gradients], exact: Sequence[Gradients]) -> dict[str, Grams]:
    """Returns the inner products of the errors of whole gradients by layer: all GEMMs, all layers below.

    Args:
      found: the gradients of each batch, on the host or, which is faster, on the device.
      exact: those without errors.
    """
    of_layer, grams = jax.jit(_error_grams, compiler_options=compiler_options([get_policy("fp32")], None)), {}
    for name in exact[0]:
        for i in range(len(exact[0][name])):
            ours, g = (jnp.stack([gradients[name][i] for gradients in side]) for side in (found, exact))
            grams[f"blocks.{i}.{name}"] = _on_host(of_layer(ours, g))
    return grams


def total(grams: Mapping[str, Grams], layer: str = "") -> Grams:
    """Returns the inner products over all layers whose name ends with `layer`."""
    chosen = [g for name, g in grams.items() if name.endswith(layer)]
    return sum(chosen[1:], start=chosen[0])


def _layer_grams(variants: tuple[Gemm, ...]) -> Callable:
    """Returns a jitted function from a layer's tensors in all batches to each variant's inner products."""

    @functools.partial(jax.jit, compiler_options=compiler_options([get_policy("fp32")], None))
    def of_layer(
        x: Float[Array, "batches tokens d_in"], dy: Float[Array, "batches tokens d_out"], keys: jax.Array
    ) -> list[Products]:
        x, dy = x.astype(jnp.float32), dy.astype(jnp.float32)
        exact = jnp.matmul(x.swapaxes(1, 2), dy, precision=jax.lax.Precision.HIGHEST)
        results = []
        for gemm in variants:
            computed = jax.lax.map(lambda a, g=gemm: weight_gradient(a[0], a[1], g, a[2]), (x, dy, keys))
            results.append(_error_grams(computed, exact))
        return results

    return of_layer


def _error_grams(found: Float32[Array, "batches ..."], exact: Float32[Array, "batches ..."]) -> Products:
    """Returns the inner products of `Grams`, of found - exact and exact."""
    e = found - exact
    return _gram(e, e), _gram(e, exact), _gram(exact, exact)


def _gram(a: Float32[Array, "batches ..."], b: Float32[Array, "batches ..."]) -> Array:
    """Returns the inner products as sums of up to 64 parts: one sum of millions of terms would err more."""
    parts = math.gcd(a.shape[1], 64)
    a, b = (t.reshape(len(t), parts, -1) for t in (a, b))
    return jnp.einsum("apk,bpk->pab", a, b, precision=jax.lax.Precision.HIGHEST).sum(0)


def _on_host(products: Products) -> Grams:
    return Grams(*(np.asarray(m, np.float64) for m in jax.device_get(products)))
