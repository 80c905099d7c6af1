"""Two GPUs against one: training on meshes, and products of sharded operands."""

import json

import pytest
from support.gpu_runs import ON_CPU, assert_near, final, finish, series

FIRST, LATER = 1e-3, 2e-2
"""Relative bounds on the first loss and on everything later, as for bfloat16 in tests/training/test_mesh.py:
programs round at other places, and MXFP4 enlarges what differs."""
PRODUCT = 2e-3
"""Bound between implementations of one product, as in the self-test."""
# At 1e-3 the loss has spikes in the first steps, in which the smallest differences grow.
CALM = ["--lr", "1e-4", "--warmup-steps", "5", "--eval-batches", "3", "--policy", "wgrad_hadamard"]
SIZES = (
    "--batch-size 4 --seq-len 32 --steps 4" if ON_CPU else "--batch-size 16 --seq-len 256 --steps 20"
).split()
# Two devices can share its weights between whole blocks: the model 60m, but for its d_ff of 1376, 43 blocks.
WIDE = {"d_model": 512, "n_layers": 8, "n_heads": 8, "n_kv_heads": 8, "head_dim": 64, "d_ff": 1408}
NARROW = {"d_model": 128, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "d_ff": 384}
MODEL = {"vocab_size": 256, "rope_theta": 10_000.0, "norm_eps": 1e-6} | (NARROW if ON_CPU else WIDE)


def train(programs, run, *flags, **options):
    model = programs.folder / "model.json"
    model.write_text(json.dumps(MODEL))
    return programs.train(run, "--model-config", model, *SIZES, *CALM, *flags, **options)


@pytest.fixture(scope="module")
def one(programs):
    run = train(programs, "one")
    losses = list(series(run, "loss").values())
    assert losses[-1] < losses[0]
    return run


@pytest.mark.parametrize("mesh", ["data=2", "fsdp=2", "tensor=2"])
def test_a_mesh_of_two_trains_as_one_does(programs, two_gpus, one, mesh):
    run = train(programs, mesh, "--mesh", mesh, gpus=two_gpus)
    later = range(2, 1 + max(series(one, "loss")))
    assert_near(run, one, "loss", {1}, FIRST)
    assert_near(run, one, "grad_norm", {1}, LATER)
    assert_near(run, one, "loss", later, LATER)
    assert final(run, "eval_loss") == pytest.approx(final(one, "eval_loss"), rel=LATER)


@pytest.mark.parametrize("mask", ["on", "off"])
def test_a_sequence_on_two_gpus_trains_as_on_one(programs, two_gpus, mask):
    size = SIZES[SIZES.index("--batch-size") + 1]
    flags = "--accumulate", size, "--seq-len", "64" if ON_CPU else "512", "--document-mask", mask
    alone = train(programs, f"alone-{mask}", *flags)
    shared = train(programs, f"context-{mask}", *flags, "--mesh", "context=2", gpus=two_gpus)
    assert_near(shared, alone, "loss", {1}, FIRST)
    assert_near(shared, alone, "grad_norm", {1}, LATER)
    assert final(shared, "eval_loss") == pytest.approx(final(alone, "eval_loss"), rel=LATER)


def test_experts_on_two_gpus_multiply_as_on_one(programs, two_gpus):
    """Tokens travel whole, or packed as the Fprop quantizes them, to the same bits."""
    cases = "fp32:expert=2", "full_sr:expert=2", "nvfp4:expert=2"
    found = finish(programs.start("-m", "support.contexts", "experts", *cases, gpus=two_gpus))
    for record in map(json.loads, found.splitlines()[-len(cases) :]):
        assert max(record["errors"]) < PRODUCT, record
    cases = "tetrajet:expert=2", "lumen_dequantized:expert=2"
    found = finish(programs.start("-m", "support.contexts", "traffic", *cases, gpus=two_gpus))
    for record in map(json.loads, found.splitlines()[-len(cases) :]):
        assert record["same"] == [True] * 4, record


@pytest.mark.parametrize("policy", ["wgrad_hadamard", "full_sr"])
def test_products_on_two_gpus_are_those_of_one(programs, two_gpus, policy):
    sizes = (4, 64, 128, 64) if ON_CPU else (8, 256, 512, 1024)
    found = json.loads(
        finish(programs.start("-m", "support.gpu_products", policy, *sizes, gpus=two_gpus)).splitlines()[-1]
    )
    assert len(found) == 4
    assert all(difference < PRODUCT for layout in found.values() for difference in layout), found
