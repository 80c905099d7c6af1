"""Expert parallelism: rows arrive in the order of one device, and training is that of one device."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.llamas import layer_policies
from support.programs import on_devices

import mxjax
from models import decoder
from models.configs import get_config
from models.experts import parallel as expert_parallel
from models.experts.layer import check_policies
from models.experts.parallel import Exchange, place, shape_of
from models.experts.traffic import check_traffic, pack_rows, row_bytes, traffic_text, unpack_rows
from training.sharding import check_batch, check_shards, parse_mesh

EXPERTS, ACTIVE, TOKENS = 8, 2, 96


@pytest.mark.parametrize("pieces", [1, 4, 64])
def test_pieces_of_runs_are_the_runs(pieces):
    runs = np.array([[0, 1, 7], [64, 65, 1000]], np.int32)
    sizes, begins = jax.device_get(expert_parallel.cut(jnp.asarray(runs), pieces))
    for at, run in np.ndenumerate(runs):
        rows = [np.arange(begin, begin + size) for size, begin in zip(sizes[at], begins[at], strict=True)]
        np.testing.assert_array_equal(np.concatenate(rows), np.arange(run))
        assert sizes[at].max() == -(-run // pieces)


@pytest.mark.parametrize("text", ["expert=4,data=2", "data=2,expert=2,fsdp=2", "expert=2,fsdp=2,tensor=2"])
@pytest.mark.parametrize("chosen", [8, 2, 1])
def test_rows_arrive_in_the_order_of_one_device(text, chosen):
    """Tokens choose among the first experts; at the worst all choose those of one device."""
    sizes = parse_mesh(text, 8)
    shape = shape_of(sizes, TOKENS, ACTIVE, EXPERTS, 12)
    rng, own = np.random.default_rng(chosen), TOKENS // shape.devices
    active = min(chosen, ACTIVE)
    experts = [[rng.permutation(chosen)[:active] for _ in range(own)] for _ in range(shape.devices)]
    counts = np.array([np.bincount(np.ravel(e), minlength=EXPERTS) for e in experts], np.int32)
    found = [jax.device_get(place(shape, jnp.asarray(counts), jnp.int32(me))) for me in range(shape.devices)]
    runs = found[0][0]
    np.testing.assert_array_equal(Exchange(shape, None, runs, None).arrived, counts.sum(axis=0))
    tight = Exchange(shape._replace(capacity=12), None, runs, None)
    assert np.sum(tight.arrived) < counts.sum()
    shares, n = shape.devices // shape.owners, EXPERTS // shape.owners
    arrived = np.full((shape.devices, shape.capacity), -1)
    for source in range(shape.devices):
        mine = np.repeat(np.arange(EXPERTS), counts[source])
        before = counts[:source].sum(axis=0)
        places = [before[e] + np.arange(counts[source, e]) for e in range(EXPERTS)]
        names = 1000 * mine + np.concatenate(places)  # the expert of a row, and its place among all tokens
        for to, run in np.ndindex(shape.devices, n):
            size, sent, placed = (a[source, to, run] for a in runs)
            assert np.all(arrived[to, placed : placed + size] == -1)
            arrived[to, placed : placed + size] = names[sent : sent + size]
        assert runs.sizes[source].sum() == active * own
        assert runs.sizes[source].sum(axis=1).max() <= shape.most
    for owner in range(shape.owners):
        rows = []
        for e in range(owner * n, (owner + 1) * n):
            rows += [1000 * e + i for i in range(counts[:, e].sum())]
            rows += [-1] * (-len(rows) % shape.unit)
        length = max(-(-len(rows) // (shape.unit * shares)), 1) * shape.unit
        rows += [-1] * (shares * length - len(rows))
        for share in range(shares):
            outer, inner = divmod(share, shape.inner)
            device = (outer * shape.owners + owner) * shape.inner + inner
            expected = np.full(shape.capacity, -1)
            expected[:length] = rows[share * length : (share + 1) * length]
            np.testing.assert_array_equal(arrived[device], expected)
            placement = found[device][1]
            np.testing.assert_array_equal(placement.used, expected >= 0)
            names = 1000 * placement.experts + placement.offsets
            np.testing.assert_array_equal(names[placement.used], expected[expected >= 0])
            filled = [-(-counts[:, e].sum() // 4) * 4 for e in range(EXPERTS)]
            first = np.array([sum(filled[:e]) for e in placement.experts])
            places = placement.groups(4).places
            np.testing.assert_array_equal(places, first + placement.offsets)
            assert placement.sizes.sum() >= placement.used.sum()


@pytest.mark.parametrize(
    ("traffic", "there"), [pytest.param(None, "bf16[{},128]", marks=pytest.mark.slow), ("fp4", "u8[{},68]")]
)
def test_on_gpus_rows_travel_by_one_collective_each_way(monkeypatch, traffic, there):
    """Of one block, and its gradient; only packed tokens are not in bfloat16."""
    monkeypatch.setattr(expert_parallel, "on_gpu", lambda: True)
    model = dataclasses.replace(get_config("moe-tiny"), n_layers=1)
    sizes = parse_mesh("expert=2,data=2,tensor=2", 8)
    types = (jax.sharding.AxisType.Auto,) * len(sizes)
    options = {"policies": layer_policies(model, "tetrajet"), "key": jax.random.key(0), "traffic": traffic}

    def loss(params, batch):
        return decoder.mean_loss(model, params, batch, **options)

    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((*sizes.values(),), (*sizes,), types)):
        batch = jax.ShapeDtypeStruct((8, 17), jnp.int32)
        text = str(jax.make_jaxpr(jax.grad(loss))(decoder.abstract_params(model), batch))
    shapes = re.findall(r":(\w+\[[\d,]+\]) = ragged_all_to_all", text)
    capacity = shape_of(sizes, 128, 2, 8, 32).capacity
    whole = f"bf16[{capacity},128]"
    assert sorted(shapes) == sorted([there.format(capacity), "bf16[64,128]", whole, "bf16[64,128]"])


FP32 = ["fp32:expert=2,fsdp=2,tensor=2:8:16"]
PRODUCTS = ["tetrajet:expert=8", "nvfp4:expert=2,context=2,data=2", "fp8:expert=4,tensor=2:fp8_carriers"]
PRODUCTS += ["full_sr:expert=2,data=2,fsdp=2:fp8_carriers"]
PACKED = ["tetrajet:expert=2,data=2,fsdp=2", "lumen_dequantized:expert=4,tensor=2"]
QUANTIZED = ["wgrad_sr:expert=2,fsdp=2,tensor=2:8:16", "wgrad_hadamard:expert=8:8:16"]
QUANTIZED += ["nvfp4:expert=2,context=2,data=2:4:64", "fp32:expert=4,data=2:8:16"]


def check_losses(found, cases, loss, gradients):
    assert [record["case"] for record in found] == cases
    for record in found:
        assert record["loss"] < loss, record
        assert record["gradients"] < gradients, record


@pytest.mark.slow
def test_losses_products_and_packed_tokens_are_those_of_one_device():
    """Losses and gradients of a model with biases, whose blocks are of two kinds.

    Products of experts with many tokens, few and none have the bits of one device: blocks and random bits
    depend on no mesh, only sums do. Packed tokens give Fprop, Dgrad and a Wgrad that reads what arrives the
    bits of whole ones, from rows as the Fprop quantizes them.
    """
    words = "losses", *FP32, "experts", *PRODUCTS, "traffic", *PACKED
    found = {record["case"]: record for record in on_devices(8, "support.contexts", *words)}
    check_losses([found[case] for case in FP32], FP32, 1e-6, 1e-4)
    for case in PRODUCTS:
        assert max(found[case]["errors"]) < 3e-7, case
    for case in PACKED:
        assert found[case]["same"] == [True] * 4, case
        assert not found[case]["whole"], case


@pytest.mark.exhaustive
def test_quantized_losses_and_gradients_are_those_of_one_device():
    """Random bits are the same too; a last bit may round an element elsewhere, as on other meshes."""
    check_losses(on_devices(8, "support.contexts", "losses", *QUANTIZED), QUANTIZED, 1e-5, 5e-3)


@pytest.mark.slow
def test_each_device_multiplies_its_experts_by_grouped_kernels():
    """By Triton's interpreter in three products; kernels are the default where they run."""
    cases = {
        "bf16:expert=2:": ("value_rows_kernel", "value_sums_kernel"),
        "fp8:expert=2:triton": ("value_rows_kernel", "value_sums_kernel"),
        "full_hadamard:expert=2,data=2:triton": ("grouped_rows_kernel", "grouped_sums_kernel"),
        "tetrajet_v2:expert=2,data=2:": None,  # whose scales along runs no kernel multiplies
    }
    for record in on_devices(8, "support.contexts", "kernels", *cases, TRITON_INTERPRET="1"):
        names = cases[record["case"]]
        assert record["kernels"] == ([names[0], *names] if names else []), record
        assert max(record["errors"]) < 3e-7, record


@pytest.mark.parametrize("rule", ["floor", "even", "uos", "rceil", "ceil"])
def test_packed_rows_are_the_values_of_the_fprop_and_stay_so(rule):
    """Blocks have every largest magnitude in a binade, and NaN or zeros; the last one is short."""
    operand = mxjax.Operand(scale_rule=rule)
    largest = np.linspace(1, 2, 129, dtype=np.float32)[:, None]
    x = largest * np.random.default_rng(0).uniform(-1, 1, (129, 80)).astype(np.float32)
    x[:, ::32] = largest
    x[0, 40], x[1] = np.nan, 0
    x = jnp.asarray(x * 2.0 ** np.arange(-64, 65, dtype=np.float32)[:, None], jnp.bfloat16)
    expected = mxjax.dequantize(mxjax.quantize(x, operand))
    packed = pack_rows(x, operand)
    assert (packed.shape, packed.dtype) == ((129, row_bytes(80)), jnp.uint8)
    assert row_bytes(64) * 8 == 64 * 4.25
    found = unpack_rows(packed, 80, jnp.bfloat16)
    np.testing.assert_array_equal(found.astype(jnp.float32), expected)
    np.testing.assert_array_equal(mxjax.dequantize(mxjax.quantize(found, operand)), expected)
    assert not unpack_rows(jnp.zeros_like(packed), 80, jnp.bfloat16).any()


@pytest.mark.parametrize(
    ("policy", "owners", "message"),
    [
        ("tetrajet", 1, "travel along the mesh axis expert; add --mesh expert=N"),
        ("fprop_dgrad", 2, "blocks.0.mlp.gate_up .* Wgrad reads fp8_e4m3 of the tokens"),
        ("fp8", 2, "blocks.0.mlp.gate_up .* reads fp8_e4m3; take another policy, such as tetrajet"),
        ("full_hadamard", 2, r"without rotation or prescale, and reads mxfp4:floor \(H16\)"),
        ("full_sr", 2, "or prescale, and reads mxfp4:floor:sr"),
        ("primus_turbo", 2, "Wgrad reads mxfp4:even of the tokens .* by --set wgrad.lhs.source=dequantized"),
    ],
)
def test_packed_tokens_are_refused_where_they_would_change_results(policy, owners, message):
    model = get_config("moe-tiny")
    check_traffic(None, layer_policies(model, policy), owners)
    with pytest.raises(ValueError, match=message):
        check_traffic("fp4", layer_policies(model, policy), owners)


def test_blocks_without_experts_send_no_tokens():
    model = dataclasses.replace(get_config("moe-tiny"), dense_d_ff=(256, 0, 0, 0))
    policies = layer_policies(model, "tetrajet", [("blocks[0].mlp.*", "bf16")])
    check_traffic("fp4", policies, 2)
    with pytest.raises(ValueError, match=r"blocks\.1\.mlp\.gate_up"):
        check_traffic("fp4", layer_policies(model, "tetrajet", [("blocks[:2].mlp.*", "bf16")]), 2)
    [text] = traffic_text(model, parse_mesh("expert=2", 2), 512, None)
    assert "196,608 bytes of tokens" in text  # three quarters of those below


def test_what_is_advised_is_taken():
    primus = mxjax.set_fields(mxjax.get_policy("primus_turbo"), ["wgrad.lhs.source=dequantized"])
    for policy in (primus, "tetrajet", "lumen_dequantized"):
        check_traffic("fp4", layer_policies(get_config("moe-tiny"), policy), 2)


def test_the_bytes_that_travel_are_counted():
    """Of 4 blocks and 512 tokens with two experts each, of which a device has half and sends half away."""
    model, sizes = get_config("moe-tiny"), parse_mesh("expert=2", 2)
    [whole] = traffic_text(model, sizes, 512, None)
    assert "sends others 262,144 bytes of tokens and 262,144 of results" in whole
    [packed] = traffic_text(model, sizes, 512, "fp4")
    assert "sends others 69,632 bytes of tokens in MXFP4, not 262,144, and 262,144 of results" in packed
    assert not traffic_text(model, parse_mesh("data=2", 2), 512, None)


def test_what_cannot_be_shared_is_refused():
    tiny, moe = get_config("tiny"), get_config("moe-tiny")
    with pytest.raises(ValueError, match="expert=2 shards experts and the model has none"):
        check_policies(tiny, layer_policies(tiny, "wgrad"), None, 2)
    with pytest.raises(ValueError, match="ragged_dot runs by implementation"):
        check_policies(moe, layer_policies(moe, "wgrad"), "scaled_dot", 2)
    check_policies(moe, layer_policies(moe, "wgrad"), "fp8_carriers", 2)
    sizes = parse_mesh("expert=3", 3)
    with pytest.raises(ValueError, match=r"expert=3 cannot split blocks.mlp.\w+'s axis 'experts' of 8"):
        check_shards(sizes, moe, layer_policies(moe, "bf16"))
    with pytest.raises(ValueError, match=r"'mlp' of 96 .* leave tensor out and let expert=N or data=N take"):
        check_shards(parse_mesh("tensor=2", 2), moe, layer_policies(moe, "wgrad"))
    with pytest.raises(ValueError, match="data x expert x fsdp = 3; take --batch-size 3 or 6"):
        check_batch(sizes, 4, 1, lambda sizes: False)
