"""What one early checkpoint says of each cell's operands and products, layer by layer, beside final losses.

    python -m benchmarks.study gemms RUN --step 200 --out docs/results/study/gemms.json

`benchmarks.study.diagnosis` splits errors of whole gradients; here are those of single GEMMs. All cells are
measured on the tensors of one pass in fp8, which are the same for all.
"""

import concurrent.futures
import functools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array, Float

import eval as evaluation
from analysis.diagnose.capture import Pass, make_pass
from analysis.diagnose.measures import MANTISSA_BINS, mean_energy, shape_of
from benchmarks.study.cells import BASELINE, policy_of
from benchmarks.study.diagnosis import COMPILATIONS, settings_of, with_keys
from benchmarks.study.programs import IMPLEMENTATION
from benchmarks.study.runner import current_commit
from benchmarks.study.studies import STUDIES
from models import llama
from models.block import linear_weights
from mxjax import stats
from mxjax.numerics.array import dequantize
from mxjax.numerics.blocks import block_max, magnitude_bits
from mxjax.numerics.formats import BLOCK
from mxjax.operands.use import part_of, quantize_input
from mxjax.policy import OPERANDS, Gemm, Policy
from mxjax.products.draws import gemm_inputs
from mxjax.recipes import get_policy
from training.files import write_atomically
from training.process.environment import enable_compilation_cache, facts, input_errors

Numbers = dict[str, Any]


def main(
    run: Annotated[pathlib.Path, tyro.conf.Positional],
    *,
    study: str = "ladder-60m-tuned,rules-60m,grid-60m",
    step: int | None = None,
    batches: int = 2,
    batch_size: int | None = None,
    commit: str | None = None,
    out: pathlib.Path,
) -> None:
    """Measures the operands and products of the cells of studies on a run's checkpoint.

    Args:
      run: folder of a run of train.py, best in fp8.
      study: studies whose policies to measure, joined by commas.
      step: step of the checkpoint. Default: the last.
      batches: number of batches of the run's held-out data.
      batch_size: sequences a batch; default, the run's.
      commit: commit for the record; default, the checkout's.
      out: JSON file to write.
    """
    enable_compilation_cache()
    with input_errors():
        if unknown := [name for name in study.split(",") if name not in STUDIES]:
            raise ValueError(f"unknown study {', '.join(unknown)}; the studies are {', '.join(STUDIES)}")
        if out.exists():
            raise ValueError(f"{out} exists; name another --out")
        arguments = evaluation.EvalConfig(run, step=step, batches=batches, batch_size=batch_size)
        restored = evaluation.restore(arguments)
        held_out = evaluation.read_batches(arguments, restored)
        chosen = {cell.label: policy_of(cell) for name in study.split(",") for cell in STUDIES[name]}
        key = jax.random.key(0)
        layers = llama.layer_policies(restored.model, get_policy(BASELINE))
        forward = make_pass(restored.model, layers, IMPLEMENTATION)
        passes = [jax.device_get(forward(restored.params, b, k)) for b, k in with_keys(held_out, key)]
        record = {"run": run.name} | settings_of(restored, held_out)
        record |= {"study": study, "commit": commit or current_commit(), "versions": facts()}
        record |= measure(chosen, passes, linear_weights(restored.params["blocks"]), key)
        write_atomically(out, json.dumps(record) + "\n")
    print(f"written to {out}")


def measure(
    policies: Mapping[str, Policy], passes: Sequence[Pass], weights: Mapping[str, Any], key: jax.Array
) -> Numbers:
    """Returns "cells", the numbers of each policy by GEMM, and "token_mean" by layer, in means over batches.

    GEMMs that several policies share are measured once.
    """
    distinct = dict.fromkeys(pair for policy in policies.values() for pair in policy.gemms.items())
    found: dict[tuple[str, Gemm], Numbers] = {}
    with concurrent.futures.ThreadPoolExecutor(COMPILATIONS) as pool:
        jobs = [pool.submit(_measure_gemm, name, gemm, passes, weights, key) for name, gemm in distinct]
        for pair, job in zip(distinct, jobs, strict=True):
            found[pair] = job.result()
            print(f"{len(found)} of {len(distinct)} GEMMs measured", flush=True)
    cells = {
        name: {gemm: found[gemm, how] for gemm, how in policy.gemms.items()}
        for name, policy in policies.items()
    }
    return {"cells": cells, "token_mean": _token_means(passes)}


def _measure_gemm(
    name: str, gemm: Gemm, passes: Sequence[Pass], weights: Mapping[str, Any], key: jax.Array
) -> Numbers:
    """Returns one GEMM's numbers in means over layers, batches and blocks; see `of_gemm`."""
    measured = []
    for layer, w in weights.items():
        run = jax.jit(functools.partial(_of_blocks, name, gemm))
        compiled = None
        for i, one in enumerate(passes):
            arguments = one.tensors[layer].x, w, one.tensors[layer].dy, jax.random.fold_in(key, i)
            compiled = compiled or run.lower(*arguments).compile()
            measured.append(jax.tree.map(lambda leaf: np.mean(leaf, axis=0), compiled(*arguments)))
    mean = jax.tree.map(lambda *leaves: np.mean(np.stack(leaves), axis=0), *measured)
    return jax.tree.map(
        lambda leaf: [round(float(x), 5) for x in leaf] if leaf.ndim else _rounded(leaf), mean
    )


def _of_blocks(
    name: str, gemm: Gemm, xs: jax.Array, ws: jax.Array, dys: jax.Array, key: jax.Array
) -> Numbers:
    return jax.lax.map(lambda block: of_gemm(name, gemm, block[0], block[1], block[2], key), (xs, ws, dys))


def of_gemm(
    name: str,
    gemm: Gemm,
    x: Float[Array, "*batch d_in"],
    w: Float[Array, "d_in d_out"],
    dy: Float[Array, "*batch d_out"],
    key: jax.Array,
) -> Numbers:
    """Returns the errors of one GEMM's product and of both operands, as arrays.

    An operand also has the shape of what is quantized, after the rotation if there is one, and "mantissas",
    the shares of nonzero blocks by the mantissa of their largest magnitude.

    Args:
      name: "fprop", "dgrad" or "wgrad"; operands that an earlier GEMM has quantized are not supported.
    """
    x, w, dy = (t.astype(jnp.float32).reshape(-1, t.shape[-1]) for t in (x, w, dy))
    sides = {"fprop": ((x, -1), (w, -2)), "dgrad": ((dy, -1), (w, -1)), "wgrad": ((x, -2), (dy, -2))}[name]
    inputs = gemm_inputs(gemm, sides[0][1], sides[1][1], key)
    tensors = [(part_of(t, how), how) for (t, _), how in zip(sides, inputs, strict=True)]
    quantized = [quantize_input(t, how) for (t, _), how in zip(sides, inputs, strict=True)]
    axes = inputs[0].axis, inputs[1].axis
    exact = _product(tensors[0][0], tensors[1][0], axes)
    approximate = _product(dequantize(quantized[0]), dequantize(quantized[1]), axes)
    found: Numbers = {"product": stats.error(exact, approximate)._asdict()}
    for operand, (t, how), q in zip(OPERANDS[name], tensors, quantized, strict=True):
        bits = magnitude_bits(block_max(t, (1, BLOCK), how.axis)).ravel()
        part = (bits & 0x7F_FFFF) // (2**23 // MANTISSA_BINS)
        counts = jnp.bincount(part, (bits > 0).astype(jnp.float32), length=MANTISSA_BINS)
        found[operand] = stats.quantization(t, q)._asdict() | {
            "shape": shape_of(t, how.axis)._asdict(),
            "mantissas": counts / jnp.maximum(jnp.sum(counts), 1),
        }
    return found


def _product(lhs: jax.Array, rhs: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Returns the product over these axes, exactly but for float32's sums."""
    dimensions = ((axes[0] % 2,), (axes[1] % 2,)), ((), ())
    return jax.lax.dot_general(lhs, rhs, dimensions, precision=jax.lax.Precision.HIGHEST)


def _token_means(passes: Sequence[Pass]) -> dict[str, dict[str, float]]:
    """Returns the share of the energy of x and dy in their mean over tokens, by layer."""
    found = {}
    for layer in passes[0].tensors:
        of_layer = {name: [getattr(one.tensors[layer], name) for one in passes] for name in ("x", "dy")}
        found[layer] = {
            name: _rounded(np.mean([mean_energy(_flat(block)) for t in ts for block in t]))
            for name, ts in of_layer.items()
        }
    return found


def _flat(t: np.ndarray) -> jax.Array:
    return jnp.asarray(t, jnp.float32).reshape(-1, t.shape[-1])


def _rounded(value: Any) -> float:
    return float(f"{float(value):.6g}")
