"""The estimate of a step's memory against what XLA's CPU allocates, `--plan`, and pieces of logits."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from support.marks import parametrize
from support.runs import error_of

import mxjax
import train as training_program
from models import decoder, lora
from models.configs import DecoderConfig, ExpertsConfig
from models.cross_entropy import cross_entropy, one_pass_logsumexp
from models.gemms import LINEAR_LAYERS, linear_weights
from models.loss import LOSS_TOKENS
from training.command_line import parse
from training.config import OptimizerConfig
from training.data.indexed_dataset import IndexedWriter
from training.memory import ONE_DEVICE, Memory, device_bytes, step_memory
from training.optimizer.muon import working_bytes
from training.optimizer.optimizers import optimizer_of
from training.run import forecast
from training.run.setup import set_up
from training.step import init_state, make_train_step
from training.trainer import Trainer

SMALL = DecoderConfig(257, 64, 4, 4, 2, 16, 192)
MIXED = dataclasses.replace(SMALL, experts=ExpertsConfig(2, 2), d_ff=96, dense_d_ff=(192, 0, 192, 0))


def compare(
    config,
    batch_size,
    seq_len,
    accumulate,
    policy,
    implementation,
    remat,
    settings=None,
    rank=None,
    compiles=True,
):
    """Returns the estimate and what the step takes if it compiles, in bytes; with a rank, of adapters."""
    settings = settings or OptimizerConfig()
    policies = decoder.layer_policies(config, mxjax.get_policy(policy))
    optimizer = optimizer_of(settings, config, None, policies)
    dtype = jnp.dtype(settings.master)

    def first():
        params, frozen = decoder.init(config, jax.random.key(0)), None
        if rank is not None:
            shapes = lora.packed_like(params, LINEAR_LAYERS)
            frozen = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
            params = lora.adapters(linear_weights(params["blocks"]), rank, jax.random.key(0))
        state = init_state(jax.tree.map(lambda w: w.astype(dtype), params), optimizer)
        return state._replace(frozen=frozen)

    state = jax.eval_shape(first)
    options = {"implementation": implementation, "remat": remat}
    estimate = step_memory(
        config,
        policies,
        state.params,
        state.opt_state,
        frozen=state.frozen,
        batch_size=batch_size,
        seq_len=seq_len,
        accumulate=accumulate,
        update=working_bytes(state.params) if settings.optimizer == "muon" else 0,
        **options,
    )
    if not compiles:
        return estimate, None

    def loss(params, batch, key):
        params = params if rank is None else lora.attach(*params)
        return decoder.mean_loss(config, params, batch, policies=policies, key=key, **options)

    step = make_train_step(loss, optimizer, accumulate=accumulate)
    batch = jax.ShapeDtypeStruct((batch_size, seq_len + 1), jnp.int32)
    key, rate = jax.eval_shape(lambda: (jax.random.key(0), jnp.zeros(())))
    m = step.lower(state, batch, key, rate).compile().memory_analysis()
    held = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    return estimate, held + m.temp_size_in_bytes


@parametrize(
    "case",
    (SMALL, 16, 128, 2, "bf16", "xla", "full"),
    slow=[
        (SMALL, 8, 64, 1, "bf16", "xla", "none"),
        (SMALL, 8, 64, 1, "bf16", "xla", "dots"),
        (MIXED, 8, 64, 1, "bf16", "xla", "none"),
        (SMALL, 8, 128, 1, "wgrad_hadamard", "fp8_carriers", "fp4"),
        (DecoderConfig(4096, 64, 2, 4, 2, 16, 192), 4, 64, 1, "bf16", "xla", "full"),
        (SMALL, 2, 4096, 1, "bf16", "xla", "full"),
    ],
    exhaustive=[
        (DecoderConfig(257, 256, 2, 4, 4, 64, 688), 2, 64, 1, "bf16", "xla", "none"),
        (SMALL, 2, 1024, 1, "bf16", "xla", "none"),
    ],
)
def test_the_estimate_is_near_what_is_allocated(case):
    """Of a model, a batch, a length, parts, a policy, an implementation and what is rematerialized."""
    config, (estimate, allocated) = case[0], compare(*case)
    assert estimate.parameters == 4 * config.n_params
    assert estimate.optimizer == pytest.approx(8 * config.n_params, rel=0.01)
    assert 0.7 < allocated / estimate.total < 1.4


@pytest.mark.slow
def test_adapters_and_packed_weights_are_counted():
    """Packed weights take 4.25 bits, and moments and gradients are those of the adapters.

    XLA's CPU has one more copy of a block's unpacked weights.
    """
    model = DecoderConfig(257, 256, 2, 4, 4, 64, 672)
    estimate, allocated = compare(model, 2, 64, 1, "weight_only", "xla", "none", rank=4)
    shapes = [w.shape for w in linear_weights(decoder.abstract_params(model)["blocks"]).values()]
    linear, adapters = sum(map(math.prod, shapes)), sum(2 * 4 * (d_in + d_out) for _, d_in, d_out in shapes)
    rest = model.n_params - linear
    assert estimate.parameters == 17 / 32 * linear + 4 * rest + 4 * adapters
    assert estimate.gradients == 4 * adapters
    assert estimate.optimizer == pytest.approx(8 * adapters, rel=0.01)
    assert 0.5 < allocated / estimate.total < 2


# Updates in bfloat16 draw bits for every array, which take longest to compile.
@parametrize(
    ("moments", "compiles"),
    ("bfloat16", False),
    slow=[("float32", True)],
    exhaustive=[("bfloat16", True)],
)
def test_muon_s_moments_and_temporary_arrays_are_counted(moments, compiles):
    """The parameters have the moments' type."""
    model = DecoderConfig(257, 256, 2, 4, 4, 64, 688)
    config = OptimizerConfig(optimizer="muon", moments=moments, master=moments)
    estimate, allocated = compare(model, 2, 64, 1, "bf16", "xla", "none", config, compiles=compiles)
    size = jnp.dtype(moments).itemsize
    assert estimate.parameters == size * model.n_params
    assert estimate.gradients == 4 * model.n_params
    vocabulary = 2 * 257 * 256 + 5 * 256  # and norms, which have two moments
    assert estimate.optimizer == pytest.approx(size * (model.n_params + vocabulary), rel=0.01)
    assert not compiles or 0.7 < allocated / estimate.total < 1.4


def estimate(**options):
    policies = decoder.layer_policies(SMALL, mxjax.get_policy("bf16"))
    params = jax.eval_shape(lambda: decoder.init(SMALL, jax.random.key(0)))
    return step_memory(SMALL, policies, params, params, **{"seq_len": 64} | options)


def test_parts_and_devices_share_a_batch():
    whole = estimate(batch_size=16)
    assert estimate(batch_size=16, mesh=ONE_DEVICE | {"data": 2}) == estimate(batch_size=8) < whole
    assert estimate(batch_size=16, mesh=ONE_DEVICE | {"context": 2}) == estimate(batch_size=8)
    half = estimate(batch_size=1, seq_len=32)
    assert estimate(batch_size=1, mesh=ONE_DEVICE | {"context": 2}).activations == half.activations
    parts = estimate(batch_size=16, accumulate=2)
    assert parts.activations == estimate(batch_size=8).activations
    assert parts.gradients == 2 * whole.gradients


def test_devices_share_heads_width_and_vocabulary():
    model = dataclasses.replace(SMALL, vocab_size=256)
    alike = dataclasses.replace(model, n_heads=2, n_kv_heads=1, d_ff=96, vocab_size=128)
    params = decoder.abstract_params(alike)  # as a device has them
    policies = decoder.layer_policies(SMALL, mxjax.get_policy("bf16"))
    options = {"batch_size": 16, "seq_len": 64, "remat": "full"}
    expected = step_memory(alike, policies, params, params, **options)
    found = step_memory(model, policies, params, params, mesh=ONE_DEVICE | {"tensor": 2}, **options)
    assert found == expected


def test_a_device_holds_its_shards():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    array = jax.ShapeDtypeStruct((6, 2), jnp.float32, sharding=sharding)
    assert device_bytes({"a": array, "b": jnp.zeros(3, jnp.bfloat16)}) == 6 * 2 * 4 + 6
    abstract = AbstractMesh((2,), ("x",))
    array = jax.ShapeDtypeStruct((6, 2), jnp.float32, sharding=NamedSharding(abstract, PartitionSpec("x")))
    assert device_bytes(array) == 3 * 2 * 4


def test_an_estimate_reads_in_gib():
    memory = Memory(2**30, 2**31, 2**30, 150 * 2**30, 2**20)
    found = str(memory)
    assert found == "154 GiB (parameters 1, optimizer 2, gradients 1, activations 150, working 0.000977)"


def test_cross_entropy_and_its_gradient_are_optax_s():
    logits = jax.random.normal(jax.random.key(0), (3, 5, 17)) * 4
    targets = jax.random.randint(jax.random.key(1), (3, 5), 0, 17)

    def both(f):
        return jax.jit(jax.value_and_grad(lambda x: jnp.sum(jnp.sin(f(x, targets)))))(logits)

    found = both(cross_entropy)
    expected = both(optax.softmax_cross_entropy_with_integer_labels)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected)


def test_the_one_pass_normalizer_is_scipy_s():
    logits = np.random.default_rng(0).normal(size=(2, 6, 1000)).astype(np.float32) * 20
    logits[0, :4, 0] = -np.inf, np.inf, np.nan, 3e38
    logits[0, 4], logits[0, 5, :700] = -np.inf, -np.inf
    expected = scipy.special.logsumexp(logits.astype(np.float64), axis=-1)
    np.testing.assert_allclose(jax.jit(one_pass_logsumexp)(logits), expected, rtol=1e-6)


def test_logits_exist_in_pieces_and_the_head_is_converted_once():
    vocab, d = 128_256, 32
    config = DecoderConfig(vocab, d, 1, 2, 1, 16, 32)
    policies = decoder.layer_policies(config, mxjax.get_policy("bf16"))
    params = jax.eval_shape(lambda: decoder.init(config, jax.random.key(0)))

    def loss(params, batch):
        return decoder.mean_loss(config, params, batch, policies=policies)

    batch = jax.ShapeDtypeStruct((8, 1025), jnp.int32)  # four pieces
    hlo = jax.jit(jax.value_and_grad(loss)).lower(params, batch).compile().as_text()
    shapes = [
        [int(n) for n in found.split(",")] for found in re.findall(rf"\w\[((?:\d+,)*{vocab}(?:,\d+)*)\]", hlo)
    ]
    assert max(np.prod(shape) for shape in shapes) == LOSS_TOKENS * vocab
    head = rf"bf16\[{d},{vocab}\]\S* convert\(%?\S+\)"
    assert len(re.findall(head, hlo)) == 1
    # Float32 of the head's shape: its weight, its gradient's accumulator, and one piece's part of that.
    assert len(re.findall(rf"= f32\[{d},{vocab}\]\S* dot\(", hlo)) == 1


FLAGS = ["--batch-size", "8", "--seq-len", "64", "--policy", "bf16"]


@pytest.fixture
def plan(monkeypatch, tmp_path, capsys):
    """Returns the lines of a plan for devices with so many bytes; it leaves nothing behind."""
    monkeypatch.chdir(tmp_path)

    def lines(there_is, *flags):
        monkeypatch.setattr(forecast, "memory_there_is", lambda: there_is)
        training_program.main(["--plan", *FLAGS, *flags])
        assert list(tmp_path.iterdir()) == []
        return capsys.readouterr().out.splitlines()

    return lines


def test_a_plan_has_the_estimate_of_the_run(plan, tmp_path):
    _, memory, gpus, verdict = plan(2**30)
    run = set_up(parse(["--data", __file__, "--eval-batches", "1", *FLAGS]), tmp_path / "run")
    assert memory == f"memory a device with --remat none: {Trainer(run).memory(0)}"
    assert gpus == "GPUs: H100 (80 GB) fits, H200 (141 GB) fits, MI355X (288 GB) fits"
    assert verdict == "that fits the 1 GiB of a device here (cpu)"


def test_a_plan_says_what_fits(plan):
    _, _, _, verdict, *settings = plan(13.5 * 2**20, "--mesh", "fsdp=2")
    assert verdict.startswith("that is more than the 0.0132 GiB of a device here")
    names = [line.partition(":")[0].strip() for line in settings]
    assert names == ["--remat dots --mesh fsdp=2", "--remat full --mesh fsdp=2"]
    assert [line.partition("GiB, ")[2] for line in settings] == ["H100", "H100, fits here"]


@pytest.mark.slow
def test_a_plan_tries_parts_and_more_devices(plan):
    first, _, _, _, *settings, last = plan(
        2**20, "--mesh", "fsdp=4", "--remat", "full", "--document-mask", "off"
    )
    assert first.endswith("no mask of documents")
    names = [line.partition(":")[0].strip() for line in settings]
    parts, devices = "--remat full --accumulate 2 --mesh fsdp=4", "--remat full --mesh fsdp=8"
    assert names[:3] == [parts, devices, f"{devices},context=2"]
    assert names[-1] == f"{devices},context=2,tensor=2"
    assert last.startswith("none of them fits: shorten --seq-len")


def test_a_gpu_fits_by_the_share_of_its_memory_that_jax_takes():
    assert forecast.gpus_in_words(65e9) == (
        "GPUs: H100 (80 GB) fits with XLA_PYTHON_CLIENT_MEM_FRACTION=0.92, H200 (141 GB) fits, "
        "MI355X (288 GB) fits"
    )
    few = forecast.gpus_in_words(250e9)
    assert few.startswith(
        "GPUs: H100 (80 GB) is too small, H200 (141 GB) is too small, MI355X (288 GB) fits with"
    )


def test_a_plan_checks_as_a_run_does(tmp_path):
    assert "--batch-size 6 must be a multiple" in error_of("--plan", "--batch-size", "6", "--mesh", "fsdp=4")
    with IndexedWriter(tmp_path / "data", np.uint16) as writer:
        for n in range(1, 60):
            writer.add(np.arange(n))
    flags = "--data", tmp_path / "data", "--document-mask", "on"
    assert "--document-mask on: no token ends every document" in error_of("--plan", *flags)
