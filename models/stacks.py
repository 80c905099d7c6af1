"""The stacked blocks of a decoder, which may be of two kinds: with experts, and with a dense MLP.

Parameters of attention and norms are stacked over all blocks. `mlp` is stacked over the blocks with experts,
and `dense_mlp` over the others; a decoder of one kind has no `dense_mlp`. Consecutive blocks of one kind run
as those of a decoder of this kind alone (`DecoderConfig.block`).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from models.block import Attention, Block, Mlp, RMSNorm
from models.configs import DecoderConfig
from models.experts.layer import Experts

DENSE = "dense_mlp"
"""The module of the MLPs in a decoder that has experts too; its layers are called "mlp"."""


class MixedBlocks(nnx.Module):
    """The parameters of blocks of two kinds, each module's stacked over the blocks that have it."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        numbers, size = block_numbers(config), config.n_layers
        experts, dense = (config.block(numbers[name][0]) for name in ("mlp", DENSE))
        self.attention_norm = _stack(lambda _: RMSNorm(config.d_model, config.norm_eps), size, rngs)
        self.attention = _stack(lambda rngs: Attention(config, rngs), size, rngs)
        self.mlp_norm = _stack(lambda _: RMSNorm(config.d_model, config.norm_eps), size, rngs)
        self.mlp = _stack(lambda rngs: Experts(experts, rngs), len(numbers["mlp"]), rngs)
        self.dense_mlp = _stack(lambda rngs: Mlp(dense, rngs), len(numbers[DENSE]), rngs)


def stacked_blocks(config: DecoderConfig, rngs: nnx.Rngs) -> Block | MixedBlocks:
    """Returns blocks whose parameters have a leading axis of the blocks that have them."""
    if config.dense_d_ff:
        return MixedBlocks(config, rngs)
    return _stack(lambda rngs: Block(config, rngs), config.n_layers, rngs)


def _stack[T: nnx.Module](make: Callable[[nnx.Rngs], T], size: int, rngs: nnx.Rngs) -> T:
    found: Any = nnx.split_rngs(splits=size)(nnx.vmap(make))
    return found(rngs)


def block_numbers(config: DecoderConfig) -> Mapping[str, Sequence[int]]:
    """Returns the numbers of the blocks that have a module, for those that not all blocks have."""
    if not config.dense_d_ff:
        return {}
    found = {"mlp": [], DENSE: []}
    for i, width in enumerate(config.dense_d_ff):
        found[DENSE if width else "mlp"].append(i)
    return found


@functools.cache
def block_graph(config: DecoderConfig, i: int) -> nnx.GraphDef:
    """Returns the structure of block i, which `nnx.merge` completes with its part of the parameters."""
    return nnx.split(nnx.eval_shape(lambda: Block(config.block(i), nnx.Rngs(params=0))))[0]


def part(config: DecoderConfig, stacked: Mapping[str, Any], start: int, stop: int) -> Any:
    """Returns the parameters of consecutive blocks of one kind, stacked, by the names of that kind alone."""
    if not config.dense_d_ff:
        return slice_stack(stacked, start, stop)
    name = DENSE if config.dense_d_ff[start] else "mlp"
    first = list(block_numbers(config)[name]).index(start)
    shared = {key: stacked[key] for key in stacked if key not in ("mlp", DENSE)}
    return slice_stack(shared, start, stop) | {"mlp": slice_stack(stacked[name], first, first + stop - start)}


def slice_stack(stacked: Any, start: int, stop: int) -> Any:
    """Returns these entries of stacked arrays, which are views if the arrays are NumPy's."""
    return jax.tree.map(lambda a: a if stop - start == len(a) else a[start:stop], stacked)
