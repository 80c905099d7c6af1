"""Lowers the dot of policies and a small Llama's step for a target, without compiling kernels.

    python -m support.every_policy dots BACKEND ARCH [MODEL_POLICY ...]
    python -m support.every_policy some BACKEND ARCH [MODEL_POLICY ...]
    python -m support.every_policy steps BACKEND ARCH

prints what became of each policy and implementation, as JSON, one a line: of the dots, and of the steps of
the named policies by "xla"; or of all steps. `some` is the dots of each policy by two implementations, of
which None is one.
"""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp

import mxjax
from models import decoder
from models.gemms import linear_layers
from mxjax.kernels import lowering
from mxjax.numerics.delayed import Scales
from mxjax.runtime.devices import Target, use_target
from support.llamas import SMALL, layer_policies
from support.programs import calls_of, lower_dot, stand_in, targets_of
from training.optimizer.delayed import is_delayed

LLAMA = dataclasses.replace(SMALL, vocab_size=304)  # a multiple of 16, as the kernel of a head in FP8 needs
IMPLEMENTATIONS = ("xla", "fp8_carriers", "scaled_dot", "triton", None)


def lower_llama(target: Target, policy: str, implementation: str | None, rules=()) -> str:
    """Returns the program of a small Llama's loss and its gradients."""
    policies = layer_policies(LLAMA, policy, rules)
    scales = Scales(*[jnp.ones(LLAMA.n_layers)] * 3)
    slots = dict.fromkeys(linear_layers(LLAMA), scales) if is_delayed(policies) else None

    def loss(params, batch, key):
        return decoder.mean_loss(
            LLAMA, params, batch, policies=policies, key=key, implementation=implementation, slots=slots
        )

    batch, key = jax.ShapeDtypeStruct((2, 65), jnp.int32), jax.eval_shape(lambda: jax.random.key(0))
    with use_target(target):
        traced = jax.jit(jax.value_and_grad(loss)).trace(decoder.abstract_params(LLAMA), batch, key)
        return traced.lower(lowering_platforms=("rocm" if target.backend == "hip" else "cuda",)).as_text()


def attempt(lower, *arguments) -> dict[str, object]:
    """Returns a program's custom calls and their kernels, or the error that was raised in place of it."""
    try:
        text = lower(*arguments)
        return {"targets": sorted(targets_of(text)), "kernels": sorted({c.name for c in calls_of(text)})}
    except Exception as error:  # the test reads which
        return {"error": f"{type(error).__name__}: {error}"}


PROGRAMS = {"steps": lower_llama} | dict.fromkeys(("dots", "some"), lambda *case: lower_dot(*case).as_text())


def main(what: str, backend: str, arch: str, *model_policies: str) -> None:
    target = Target(backend, arch)
    lowering.compile_kernel = stand_in(target.compute_capability or 0)  # compiling all would take minutes
    for i, policy in enumerate(mxjax.policies()):
        for implementation in (IMPLEMENTATIONS[i % 4], None) if what == "some" else IMPLEMENTATIONS:
            said = attempt(PROGRAMS[what], target, policy, implementation)
            print(json.dumps({"policy": policy, "implementation": implementation} | said))
    for policy in model_policies:
        print(json.dumps({"model": policy} | attempt(lower_llama, target, policy, "xla")))
        in_fp8 = attempt(lower_llama, target, policy, None, [("head", "fp8")])
        print(json.dumps({"model": policy, "head": "fp8"} | in_fp8))


if __name__ == "__main__":
    main(*sys.argv[1:])
