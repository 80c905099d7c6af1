"""Context parallelism: losses and gradients are those of one device, and what is refused."""

import jax
import jax.numpy as jnp
import pytest
from support.programs import on_devices

from models.attention.context import fewest_sequences, sequence_parts
from models.attention.ring import ring_bytes
from mxjax.runtime.devices import Target
from training.sharding import parse_mesh

# A last bit may round an element elsewhere. In Dgrad's 4 bits that goes on through all blocks.
GRADIENTS = {"fp32": 1e-4, "bf16": 5e-3, "wgrad_hadamard": 5e-3, "wgrad_sr": 5e-3, "full_hadamard": 0.1}
CASES = [
    "fp32:context=2,fsdp=2,tensor=2:2:64",
    "fp32:context=4,fsdp=2:2:128:plain",
    "wgrad_sr:context=8:1:256",
]
MORE = ["fp32:context=8:2:256", "fp32:context=4,data=2:2:128", "bf16:context=8:1:256"]
MORE += ["wgrad_hadamard:context=2,fsdp=2,tensor=2:2:64", "full_hadamard:context=4,data=2:2:128"]


POLICIES = ["bf16", "wgrad_hadamard", "full_hadamard", "wgrad_sr", "wgrad_rht"]


def check_losses(found, cases):
    assert [record["case"] for record in found] == cases
    for record in found:
        assert record["loss"] < 1e-5, record
        assert record["gradients"] < GRADIENTS[record["case"].partition(":")[0]], record


@pytest.mark.slow
def test_losses_gradients_and_products_are_those_of_one_device():
    """With windows by layer, sinks and two documents a sequence, or with a causal mask alone.

    Products of shared sequences have the bits of one device: Wgrad's blocks of tokens and random bits are the
    same; only sums over devices have another order.
    """
    records = on_devices(8, "support.contexts", "losses", *CASES, "products", *POLICIES)
    check_losses(records[: len(CASES)], CASES)
    products = records[len(CASES) :]
    assert [record["policy"] for record in products] == POLICIES
    for record in products:
        *same, dw = record["errors"]
        assert same == [0, 0], record
        assert dw < 3e-7, record


@pytest.mark.exhaustive
def test_losses_and_gradients_on_more_meshes_are_those_of_one_device():
    check_losses(on_devices(8, "support.contexts", "losses", *MORE), MORE)


@pytest.mark.parametrize(
    ("text", "sequences", "length", "parts"),
    [
        ("context=8", 1, 256, 8),
        ("context=8", 2, 128, 4),  # of which four devices each share one
        ("context=4,data=2", 8, 33, 1),
        ("context=4,data=2", 2, 128, 4),
        ("fsdp=8", 8, 33, 1),
    ],
)
def test_sequences_are_cut_only_as_far_as_there_are_too_few(text, sequences, length, parts):
    assert sequence_parts(parse_mesh(text, 8), sequences, length) == parts


@pytest.mark.parametrize(
    ("text", "sequences", "length", "few"),
    [
        ("context=8", 8, 256, (1, 256)),
        ("context=8", 2, 128, (2, 128)),  # of one sequence, blocks would straddle rows
        ("context=4,data=2", 24, 100, (8, 1)),
        ("context=4,data=2", 4, 128, (2, 128)),
        ("fsdp=8", 16, 33, (8, 1)),
    ],
)
def test_evaluations_and_measurements_need_no_more_than_training(text, sequences, length, few):
    sizes = parse_mesh(text, 8)
    sequence_parts(sizes, sequences, length)
    assert fewest_sequences(sizes, sequences, length) == few
    sequence_parts(sizes, few[0], few[1])


@pytest.mark.parametrize(
    ("text", "sequences", "length", "message"),
    [
        ("context=8", 3, 256, "a divisor or a multiple of 8 sequences .*, got 3; change --batch-size"),
        ("context=8", 1, 250, "8 parts of whole blocks of 32 tokens, got --seq-len 250; take 256"),
        ("context=8", 2, 64, "4 parts .* got --seq-len 64; take 128"),
    ],
)
def test_sequences_that_devices_cannot_share_are_an_error(text, sequences, length, message):
    with pytest.raises(ValueError, match=message):
        sequence_parts(parse_mesh(text, 8), sequences, length)


@pytest.mark.parametrize(("length", "fused"), [(1024, True), (1152, False)])
def test_scores_count_unless_kernels_take_chunks(monkeypatch, length, fused):
    monkeypatch.setattr("models.attention.partial.current_target", lambda: Target("cuda", "sm_90"))
    q = jax.ShapeDtypeStruct((1, length, 8, 128), jnp.bfloat16)
    scores = ring_bytes(q, 2) - length * 128 * (12 * 8 + 32 * 2)
    assert scores == (0 if fused else 12 * 8 * 384 * length)
