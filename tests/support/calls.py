"""Small kernels and programs that call them; `python -m support.calls` prints how they lower, as JSON."""

import json
import os
import re

os.environ["JAX_NUM_CPU_DEVICES"] = "2"

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from mxjax.kernels.launch import triton_call
from mxjax.runtime.devices import Target, use_target


@triton.jit
def double_kernel(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, 2 * tl.load(x + i))


@triton.jit
def add_kernel(before, x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(out + i) + tl.load(x + i))


def double(x, **more):
    [y] = triton_call(double_kernel, x, out=[jax.typeof(x)], grid=(1,), N=x.size, **more)
    return y


def add(x, y):
    [z] = triton_call(add_kernel, x, y, out=[jax.typeof(x)], grid=(1,), in_place=True, N=x.size)
    return z


def with_unused(x):
    double(x)
    return x + 1


def loss_with_remat(x):
    return jax.checkpoint(lambda x: double(jax.lax.stop_gradient(x)) * x)(x).sum()


def main():
    x = jax.ShapeDtypeStruct((64,), jnp.float32)
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(double, mesh=mesh, in_specs=P("d"), out_specs=P("d"))

    def lower(f, *shapes, platform="rocm"):
        return jax.jit(f).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()

    def count(text):
        return text.count("custom_call @triton_kernel_call_ffi")

    def error(*arguments, **keywords):
        try:
            lower(*arguments, **keywords)
        except Exception as raised:
            return f"{type(raised).__name__}: {raised}"

    with use_target(Target("hip", "gfx950")):
        aliases = re.findall(r"operand_index = (\d+), operand_tuple_indices = \[\]", lower(add, x, x))
        said = {
            "aliased": aliases,
            "barriers": [lower(f, x, x).count("optimization_barrier") for f in (add, lambda x, y: double(x))],
            "unused": count(lower(with_unused, x)),
            "remat": count(lower(jax.grad(loss_with_remat), x)),
            "twice": count(lower(lambda x: double(double(x)), x)),
            "sharded": "tensor<32xf32>" in lower(sharded, x),
            "other platform": error(double, x, platform="cuda"),
            "arrays": error(lambda x: triton_call(double_kernel, x, x, out=[x], grid=(1,), N=64), x),
        }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
