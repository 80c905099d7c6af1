"""The parameters of a Llama on meshes: how they are cut, and the first training state.

How logical axes lie on a mesh is in `models.sharding`.
"""

import fnmatch
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from models import llama
from models.configs import LlamaConfig
from models.llama import AXES, Params
from mxjax.layers import LayerPolicies
from training.mesh import check_params, param_shardings, state_shardings, whole_units
from training.step import TrainState, init_state


def first_state(
    config: LlamaConfig, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh, key: jax.Array
) -> tuple[TrainState, TrainState]:
    """Returns a state of random parameters, made where it lies, and its shardings.

    Args:
      key: of the parameters.
    """

    def make() -> TrainState:
        return init_state(llama.init(config, key), optimizer)

    params = param_shardings(mesh, parameter_axes(config))
    shardings = state_shardings(mesh, optimizer, jax.eval_shape(make), params)
    return jax.jit(make, out_shardings=shardings)(), shardings


def check_cuts(sizes: Mapping[str, int], config: LlamaConfig, policies: LayerPolicies) -> None:
    """Raises ValueError unless a mesh of these sizes cuts the parameters as the policies need it."""
    units = parameter_units(config, policies)
    check_params(sizes, abstract_params(config), parameter_axes(config), units)


def parameter_axes(config: LlamaConfig) -> Params:
    """Returns the logical axes of every parameter, the layers' first."""

    def axes(name: str, x: jax.ShapeDtypeStruct) -> tuple[str, ...]:
        own = AXES.get(name.removeprefix("blocks."), ("norm",))
        return ("layers", *own) if name.startswith("blocks.") else own

    return _map_named(axes, abstract_params(config))


def parameter_units(config: LlamaConfig, policies: LayerPolicies) -> Params:
    """Returns how many elements along each axis of every parameter must stay on one device: a GEMM's blocks
    and rotations, and what belongs to a key/value head."""

    def units(name: str, x: jax.ShapeDtypeStruct) -> tuple[int, ...]:
        name = "head" if config.tied and name == "embedding" else name.replace("blocks.", "blocks.*.")
        own = [p for layer, p in policies.items() if fnmatch.fnmatch(layer, name)]
        unit = math.lcm(*map(whole_units, own))
        axes = AXES.get(name.removeprefix("blocks.*."), ("norm",))
        sizes = zip(x.shape[-len(axes) :], axes, strict=True)
        last = (math.lcm(unit, n // config.n_kv_heads) if axis == "heads" else unit for n, axis in sizes)
        return (*(1 for _ in x.shape[len(axes) :]), *last)

    return _map_named(units, abstract_params(config))


def abstract_params(config: LlamaConfig) -> Params:
    """Returns the shapes and dtypes of the parameters."""
    return jax.eval_shape(lambda: llama.init(config, jax.random.key(0)))


def _map_named(function: Callable[[str, Any], Any], params: Params) -> Params:
    return jax.tree.map_with_path(lambda path, x: function(".".join(str(p.key) for p in path), x), params)
