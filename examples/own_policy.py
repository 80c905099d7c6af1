"""Builds a policy and measures the errors of its GEMMs on one layer, beside those of named policies.

    python examples/own_policy.py

prints how far signal exceeds quantization noise, in dB, for the products of Fprop, Dgrad and Wgrad. Higher is
better. No GPU is needed.
"""

import jax

import mxjax
from mxjax import Gemm, Operand, Policy, Rotation

TOKENS, D_IN, D_OUT = 256, 128, 256

nearest = Operand("mxfp4", scale_rule="even")
stochastic = Operand("mxfp4", scale_rule="even", rounding="stochastic")
OWN = Policy(
    fprop=Gemm(nearest, nearest),  # y  = x @ w
    dgrad=Gemm(stochastic, nearest),  # dx = dy @ w.T
    wgrad=Gemm(nearest, nearest, Rotation(32, signs="redrawn")),  # dw = x.T @ dy
)
POLICIES = {"fp8": "fp8", "wgrad": "wgrad", "wgrad_hadamard": "wgrad_hadamard", "own": OWN}


def layer():
    """Returns the input, the weight and the output's gradient of a layer; one feature has outliers."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (TOKENS, D_IN)).at[:, 5].mul(20)
    w = jax.random.normal(keys[1], (D_IN, D_OUT)) / D_IN**0.5
    dy = jax.random.t(keys[2], 3, (TOKENS, D_OUT)) / TOKENS
    return x, w, dy


def main():
    """Returns the dB of the three products, by policy."""
    x, w, dy = layer()
    table = {}
    print(f"{'policy':16}{'fprop':>8}{'dgrad':>8}{'wgrad':>8}")
    for name, policy in POLICIES.items():
        errors = mxjax.stats.gemms(x, w, dy, policy=policy, key=jax.random.key(1))
        table[name] = [float(gemm.product.sqnr_db) for gemm in errors]
        print(f"{name:16}" + "".join(f"{db:8.1f}" for db in table[name]))
    return table


if __name__ == "__main__":
    table = main()
