"""Experts on the devices of a mesh: tokens travel to their experts, and results back. No token is dropped.

The mesh axis `expert` shards experts besides batches. All devices with the same experts share their rows
evenly, wherever the tokens come from: rows are in the order of one device, in which each expert's begin a new
unit, and each device has a run of whole units. So blocks, random bits and loads are those of one device.

A row travels at most twice, by `jax.lax.ragged_all_to_all` on GPUs. Elsewhere, by an all-to-all of buffers
that hold any distribution. Arrays of rows have the capacity for the worst one, in which all tokens choose the
experts of one device: `capacity`. On the way to their experts tokens may be packed
(`models.experts.traffic`).

Shapes in names as in `models.experts.layer`; P devices that share batches, G experts of a device, C rows
of one.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int32, Num, UInt8

from models.experts.order import Order, sort_by_expert
from models.experts.traffic import Traffic, pack_rows, unpack_rows
from models.sharding import RULES, mesh_sizes
from mxjax.numerics.operand import Operand
from mxjax.numerics.philox import PER_COUNTER
from mxjax.policy import Policy
from mxjax.products.expert_rows import Grid, Groups
from mxjax.products.ragged import ragged_dot_on_mesh, row_unit
from mxjax.runtime.devices import on_gpu

AXES = tuple(RULES["rows"] or ())
"""The mesh axes that share tokens."""
EXPERT = "expert"
"""The one that shards experts."""
_ROWS = PartitionSpec(AXES)


class Shape(NamedTuple):
    """The static sizes of an exchange.

    Attributes:
      devices: P, those that share batches.
      owners: groups of devices with the same experts.
      experts: G, experts of an owner.
      unit: rows that divide each expert's, and each device's.
      capacity: C, rows of a device.
      most: rows that travel from one device to another.
      inner: devices of an owner that are neighbours in `AXES`.
    """

    devices: int
    owners: int
    experts: int
    unit: int
    capacity: int
    most: int
    inner: int


def shape_of(sizes: Mapping[str, int], tokens: int, active: int, experts: int, unit: int) -> Shape:
    """Returns the sizes of the exchange of all devices' tokens; `unit` divides those of the layers."""
    devices, owners = math.prod(sizes[axis] for axis in AXES), sizes[EXPERT]
    own, unit = experts // owners, math.lcm(unit, PER_COUNTER)
    chosen = min(active, own)
    units = (tokens * chosen + own * (unit - 1)) // unit
    capacity = -(-units // (devices // owners)) * unit
    inner = math.prod(sizes[axis] for axis in AXES[AXES.index(EXPERT) + 1 :])
    return Shape(devices, owners, own, unit, capacity, min(tokens // devices * chosen, capacity), inner)


class Runs(NamedTuple):
    """Runs of rows that travel: those of each expert, from each device to each of its owner's devices.

    Attributes:
      sizes: rows of each run, [from, to, G].
      sent: the first of each run's rows where they come from.
      placed: the same where they go.
    """

    sizes: Int32[Array, "P P G"]
    sent: Int32[Array, "P P G"]
    placed: Int32[Array, "P P G"]

    @property
    def back(self) -> "Runs":
        """The runs of the way back."""
        return Runs(*(a.swapaxes(0, 1) for a in (self.sizes, self.placed, self.sent)))


class Placement(NamedTuple):
    """Where the rows of all devices are. All arrays but `totals` are of each device's rows, in one array.

    Attributes:
      experts: the expert of each row.
      offsets: the place of each row among those of its expert.
      used: whether there is a token; other rows are zero.
      sizes: rows of each device's experts, with those that fill up units.
      totals: tokens of each expert.
    """

    experts: Int32[Array, " PC"]
    offsets: Int32[Array, " PC"]
    used: Bool[Array, " PC"]
    sizes: Int32[Array, "P G"]
    totals: Int32[Array, " E"]

    def groups(self, unit: int) -> Groups:
        """Returns the rows as a product takes them whose random bits count places in units of `unit` rows."""
        filled = -(-self.totals // unit) * unit
        return Groups(self.sizes, (jnp.cumsum(filled) - filled)[self.experts] + self.offsets)


def place(shape: Shape, counts_PE: Int32[Array, "P E"], me: Int32[Array, ""]) -> tuple[Runs, Placement]:
    """Returns the runs that travel, and the placement of this device's rows.

    Args:
      counts_PE: each device's tokens of each expert.
      me: this device.
    """
    P, N, G, unit = shape.devices, shape.owners, shape.experts, shape.unit
    totals_E = jnp.sum(counts_PE, axis=0)
    filled_NG = (-(-totals_E // unit) * unit).reshape(N, G)
    start_NG = jnp.cumsum(filled_NG, axis=1) - filled_NG
    rows_N = jnp.sum(filled_NG, axis=1)
    length_N = jnp.maximum(-(-rows_N // (unit * (P // N))), 1) * unit  # of each device of an owner
    device_P = jnp.arange(P, dtype=jnp.int32)
    owner_P = device_P // shape.inner % N
    share_P = device_P // (shape.inner * N) * shape.inner + device_P % shape.inner
    begin_P = share_P * length_N[owner_P]
    end_P = begin_P + length_N[owner_P]

    before_PE = jnp.cumsum(counts_PE, axis=0) - counts_PE
    first_PE = jnp.cumsum(counts_PE, axis=1) - counts_PE  # of a device's own rows, sorted by expert
    own_PPG = [a.reshape(P, N, G)[:, owner_P] for a in (counts_PE, before_PE, first_PE)]
    counts_PPG, before_PPG, first_PPG = own_PPG
    from_PPG = start_NG[owner_P][None] + before_PPG
    low_PPG = jnp.maximum(from_PPG, begin_P[None, :, None])
    high_PPG = jnp.minimum(from_PPG + counts_PPG, end_P[None, :, None])
    sizes_PPG = jnp.maximum(high_PPG - low_PPG, 0)
    placed_PPG = jnp.where(sizes_PPG > 0, low_PPG - begin_P[None, :, None], 0)
    sent_PPG = jnp.where(sizes_PPG > 0, first_PPG + low_PPG - from_PPG, 0)

    start_G, filled_G = start_NG[owner_P[me]], filled_NG[owner_P[me]]
    row_C = begin_P[me] + jnp.arange(shape.capacity, dtype=jnp.int32)
    group_C = jnp.sum(start_G[None] <= row_C[:, None], axis=1, dtype=jnp.int32) - 1
    experts_C = owner_P[me] * G + group_C
    offsets_C = row_C - start_G[group_C]
    used_C = (offsets_C < totals_E[experts_C]) & (row_C < end_P[me])
    low_G, high_G = jnp.maximum(start_G, begin_P[me]), jnp.minimum(start_G + filled_G, end_P[me])
    sizes_G = jnp.maximum(high_G - low_G, 0)
    placement = Placement(experts_C, offsets_C, used_C, sizes_G[None], totals_E)
    return Runs(sizes_PPG, sent_PPG, placed_PPG), placement


class Exchange(NamedTuple):
    """The rows of all devices' experts, as `models.experts.order.Order` has those of one device.

    Attributes:
      shape: static sizes.
      order: the order of each device's own assignments.
      runs: what travels.
      placement: where rows are.
      packing: how tokens that travel to experts are packed, or None.
    """

    shape: Shape
    order: Order
    runs: Runs
    placement: Placement
    packing: Operand | None = None

    @property
    def experts(self) -> Int32[Array, " PC"]:
        """The expert of each row."""
        return self.placement.experts

    @property
    def used(self) -> Bool[Array, " PC"]:
        """Whether a row has a token."""
        return self.placement.used

    @property
    def arrived(self) -> Int32[Array, " E"]:
        """The tokens of each expert that arrays of rows have room for, which are all."""
        shape, first = self.shape, self.runs.placed
        stop = jnp.minimum(first + self.runs.sizes, shape.capacity)
        tokens_PG = jnp.sum(jnp.maximum(stop - first, 0), axis=0)
        by_owner = tokens_PG.reshape(-1, shape.owners, shape.inner, shape.experts)
        return jnp.sum(by_owner, axis=(0, 2)).reshape(-1)

    def spread(self, x_TD: Float[Array, "T D"]) -> Float[Array, "PC D"]:
        """Returns the rows, which have travelled to their experts' devices; zeros without tokens."""
        packed_TW = None if self.packing is None else pack_rows(lax.stop_gradient(x_TD), self.packing)

        def of_device(x_TD, packed_TW, order, runs):
            x_AD = order.spread(x_TD)
            if packed_TW is None:
                return travel(self.shape, self.shape.capacity, x_AD, runs)
            return travel_packed(self.shape, x_AD, order.spread(packed_TW), runs)

        return _by_device(of_device, (x_TD, packed_TW, self.order), self.runs)

    def collect(self, y: Float[Array, "PC D"], active: int) -> Float[Array, "T K D"]:
        """Returns the rows of each token's experts, which have travelled back."""

        def of_device(y, order, runs):
            return order.collect(travel(self.shape, len(order.forward), y, runs.back), active)

        return _by_device(of_device, (y, self.order), self.runs)

    def product(
        self, x: Float[Array, "PC k"], w: Float[Array, "E k n"], *, policy: Policy, **options
    ) -> Float[Array, "PC n"]:
        """Returns the products of the rows and their experts' weights; options as in `mxjax.ragged_dot`."""
        grid = Grid(AXES, EXPERT)
        return ragged_dot_on_mesh(x, w, self.placement.groups, grid, policy=policy, **options)


def exchange_on_mesh(
    experts_TK: Int32[Array, "T K"], n: int, policies: Sequence[Policy], traffic: Traffic | None = None
) -> Exchange | None:
    """Returns how the tokens of all devices reach their experts; None unless the mesh shards experts.

    Args:
      n: E, the number of experts.
      policies: those of the experts' layers, the first of which reads the tokens.
      traffic: "fp4" packs tokens as that layer's Fprop quantizes them.
    """
    sizes = mesh_sizes()
    if sizes[EXPERT] == 1:
        return None
    unit = math.lcm(*map(row_unit, policies))
    tokens, active = experts_TK.shape
    shape = shape_of(sizes, tokens, active, n, unit)

    def of_device(experts_TK, _):
        order = sort_by_expert(experts_TK, n)
        runs, placement = place(shape, lax.all_gather(order.sizes, AXES), lax.axis_index(AXES))
        return order._replace(sizes=order.sizes[None]), runs, placement

    own, same = cast(Any, _ROWS), cast(Any, PartitionSpec())
    kinds = own, same, Placement(own, own, own, own, same)
    packing = None if traffic is None else policies[0].fprop.lhs
    return Exchange(shape, *_by_device(of_device, (experts_TK,), (), kinds), packing=packing)


def _by_device(run: Callable[..., Any], sharded: tuple[Any, ...], same: Any, out_specs: Any = _ROWS) -> Any:
    """Returns `run(*sharded, same)` of each device's rows of the first; the last is the same on all."""
    in_specs = (*(_ROWS for _ in sharded), PartitionSpec())
    mapped: Any = jax.shard_map(
        run, in_specs=in_specs, out_specs=out_specs, axis_names=set(AXES), check_vma=False
    )
    return mapped(*sharded, same)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def travel(shape: Shape, length: int, x: Num[Array, "m D"], runs: Runs) -> Num[Array, "n D"]:
    """Returns the `length` rows that arrive at this device, inside `jax.shard_map`; zeros where none does.

    The gradient travels back.
    """
    me = lax.axis_index(AXES)
    exchange = _ragged if on_gpu() else _padded
    return exchange(shape, length, x, Runs(*(a[me] for a in runs)), Runs(*(a[:, me] for a in runs)))


def _travel_fwd(shape: Shape, length: int, x, runs: Runs):
    return travel(shape, length, x, runs), (x.shape[0], runs)


def _travel_bwd(shape: Shape, length: int, residuals, dy):
    rows, runs = residuals
    return travel(shape, rows, dy, runs.back), None


travel.defvjp(_travel_fwd, _travel_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def travel_packed(
    shape: Shape, x: Float[Array, "m D"], packed: UInt8[Array, "m W"], runs: Runs
) -> Float[Array, "n D"]:
    """Returns `travel` of x from its packed rows. The gradient, which is x's, travels back whole."""
    return unpack_rows(travel(shape, shape.capacity, packed, runs), x.shape[1], x.dtype)


def _travel_packed_fwd(shape: Shape, x, packed, runs: Runs):
    return travel_packed(shape, x, packed, runs), (x.shape[0], runs)


def _travel_packed_bwd(shape: Shape, residuals, dy):
    return _travel_bwd(shape, shape.capacity, residuals, dy)[0], None, None


travel_packed.defvjp(_travel_packed_fwd, _travel_packed_bwd)


def _ragged(shape: Shape, length: int, x: jax.Array, sent: Runs, received: Runs) -> jax.Array:
    nothing = jnp.zeros((length, x.shape[1]), x.dtype)
    pieces = max(1, _PIECES // sent.sizes.size) if jax.process_count() == 1 else 1
    sizes, begins = cut(sent.sizes, pieces)
    there, placed = ((first[..., None] + begins).reshape(-1) for first in (sent.sent, sent.placed))
    arriving = cut(received.sizes, pieces)[0].reshape(-1)
    return lax.ragged_all_to_all(x, nothing, there, sizes.reshape(-1), placed, arriving, axis_name=AXES)


_PIECES = 1024
"""Pieces in which a device's rows travel within a process, where XLA copies each by few threads: 32,768 rows
of 512 on two H200 take 4.4 ms there and back in their 16 runs, 0.7 in 1,024 pieces, 0.9 in 256 or 4,096
(https://github.com/openxla/xla/issues/33386). Between processes a run is one message."""


def cut(sizes: Int32[Array, "*n"], pieces: int) -> tuple[Int32[Array, "*n p"], Int32[Array, "*n p"]]:
    """Returns the sizes of so many pieces of each run, the last of which may be empty, and their begins."""
    step, sizes = jnp.expand_dims(-(-sizes // pieces), -1), jnp.expand_dims(sizes, -1)
    piece = lax.broadcasted_iota(jnp.int32, (*sizes.shape[:-1], pieces), sizes.ndim - 1)
    begins = jnp.minimum(step * piece, sizes)
    return jnp.minimum(step, sizes - begins), begins


def _padded(shape: Shape, length: int, x: jax.Array, sent: Runs, received: Runs) -> jax.Array:
    """Returns the same by one buffer to each device."""
    source_PQ = _rows_of(sent.sent, sent.sizes, shape.most, missing=x.shape[0])
    buffer_PQD = lax.all_to_all(x.at[source_PQ].get(mode="fill", fill_value=0), AXES, 0, 0, tiled=True)
    target_PQ = _rows_of(received.placed, received.sizes, shape.most, missing=length)
    nothing = jnp.zeros((length, x.shape[1]), x.dtype)
    return nothing.at[target_PQ.reshape(-1)].set(buffer_PQD.reshape(-1, x.shape[1]), mode="drop")


def _rows_of(first_PG: Array, sizes_PG: Array, most: int, missing: int) -> Int32[Array, "P most"]:
    """Returns the rows of the runs to or from each device, one run after another; then `missing`."""
    ends_PG = jnp.cumsum(sizes_PG, axis=1)
    slot_Q = jnp.arange(most, dtype=jnp.int32)
    run_PQ = jnp.sum(ends_PG[:, None] <= slot_Q[None, :, None], axis=2, dtype=jnp.int32)
    run_PQ = jnp.minimum(run_PQ, sizes_PG.shape[1] - 1)
    start_PQ = jnp.take_along_axis(first_PG - ends_PG + sizes_PG, run_PQ, axis=1)
    return jnp.where(slot_Q[None] < ends_PG[:, -1:], start_PQ + slot_Q[None], missing)
