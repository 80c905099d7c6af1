"""Architectures of Hugging Face's against transformers: logits, gradients, generation (golden files)."""

import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.llamas import layer_policies, params_of, tensors

import mxjax
from models import decoder
from models.gemms import linear_layers
from models.generation import Options, generate
from models.huggingface.architectures import ARCHITECTURES, shape_of, views
from models.huggingface.config import read_config
from models.huggingface.files import Reader, read_json
from models.huggingface.quantized import names_of
from models.huggingface.weights import read_params
from training.huggingface.exporting import export_checkpoint
from training.huggingface.importing import import_checkpoint

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "architectures"


NAMES = sorted(path.name for path in GOLDEN.iterdir())


def test_every_architecture_has_a_golden_model():
    found = {json.loads((GOLDEN / name / "config.json").read_text())["model_type"] for name in NAMES}
    assert found == {*ARCHITECTURES}


@pytest.mark.parametrize("name", NAMES)
def test_adapted_layers_have_names_of_the_checkpoint(name):
    config = read_config(read_json(GOLDEN / name / "config.json"))
    adapted = names_of(config, [f"blocks.0.{layer}" for layer in linear_layers(config)])
    assert adapted
    assert {f"{matrix}.weight" for matrix in adapted} <= tensors(GOLDEN / name).keys()


# What they have is in another architecture, too: windows, norms of queries and keys, and experts.
ALIKE = {"mistral", "qwen3", "qwen3_moe"}


@pytest.fixture(
    scope="module", params=[pytest.param(n, marks=pytest.mark.exhaustive) if n in ALIKE else n for n in NAMES]
)
def architecture(request, tmp_path_factory):
    """The name of an architecture, the run imported from its golden checkpoint, and the golden arrays."""
    folder = tmp_path_factory.mktemp(request.param)
    import_checkpoint(GOLDEN / request.param, folder / "run")
    with np.load(GOLDEN / request.param / "golden.npz") as golden:
        return request.param, folder / "run", dict(golden)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_attention_through_quantizable_products_has_windows_and_sinks(name):
    with np.load(GOLDEN / name / "golden.npz") as golden:
        config = read_config(read_json(GOLDEN / name / "config.json"))
        with Reader(GOLDEN / name) as reader:
            params, _ = read_params(reader, config)
        fp32 = mxjax.get_policy("fp32")
        unfused = dataclasses.replace(fp32, wgrad=mxjax.Gemm())  # only the Fprop is that of fp32
        policies = layer_policies(config, "fp32", [("*", "fp32"), ("*.attention.scores", unfused)])
        ours = decoder.apply(config, params, golden["tokens"], policies=policies, dtype=jnp.float32)
        assert np.max(np.abs(ours - golden["logits"])) < 2e-5


def test_gradients_are_those_of_transformers(architecture):
    name, run, golden = architecture
    config, params = params_of(run)
    policies = layer_policies(config, "fp32", [("*", "fp32")])

    @jax.jit
    @jax.value_and_grad
    def loss(params, tokens):
        return jnp.mean(decoder.losses(config, params, tokens, policies=policies, dtype=jnp.float32))

    value, grads = loss(params, jnp.asarray(golden["tokens"]))
    np.testing.assert_allclose(value, golden["loss"], rtol=1e-6)
    named = views(config, jax.tree.map(np.array, grads))
    compared = 0
    for tensor, norm in ((key[5:], value) for key, value in golden.items() if key.startswith("norm/")):
        ours = found(named, tensor)
        np.testing.assert_allclose(np.linalg.norm(ours), norm, rtol=2e-5, err_msg=tensor)
        if (theirs := golden.get(f"grad/{tensor}")) is not None:
            np.testing.assert_allclose(ours, theirs, atol=2e-5, err_msg=tensor)
            compared += 1
    assert compared >= 5, name


def found(named, tensor):
    """Returns a gradient by the tensor's name in the model, where experts are joined and gates renamed."""
    names = (tensor, tensor.replace(".mlp.", ".block_sparse_moe."))
    for name in names:
        if name in named:
            return named[name].reshape(shape_of(name, named[name]))
    layer, _, part = names[0].partition(".mlp.experts.")
    each = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}
    mlp, parts = (f"{layer}.mlp", each[part][0])
    if f"{mlp}.experts.0.{parts[0]}.weight" not in named:
        mlp, parts = f"{layer}.block_sparse_moe", each[part][1]
    experts, j = [], 0
    while f"{mlp}.experts.{j}.{parts[0]}.weight" in named:
        experts.append(np.concatenate([named[f"{mlp}.experts.{j}.{part}.weight"] for part in parts]))
        j += 1
    return np.stack(experts)


@pytest.mark.slow
def test_generated_tokens_are_those_of_transformers(architecture):
    _, run, golden = architecture
    config, params = params_of(run)
    options = Options(layer_policies(config, "fp32", [("*", "fp32")]), dtype=jnp.float32)
    prompt = jnp.asarray(golden["tokens"][:, :8])
    ours = generate(config, options, params, prompt, 12, jax.random.key(0), temperature=0.0)
    np.testing.assert_array_equal(np.stack([*ours], axis=1), golden["generated"])


def test_exports_are_what_was_imported(architecture, tmp_path):
    """Byte for byte, but gpt-oss's experts leave in bfloat16, with the values of their MXFP4."""
    name, run, _ = architecture
    export_checkpoint(run, tmp_path / "out")
    raw, theirs = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "out", GOLDEN / name))
    if name != "gpt_oss":
        assert tensors(tmp_path / "out") == tensors(GOLDEN / name)
    else:
        del theirs["quantization_config"]
    assert raw == theirs
    import_checkpoint(tmp_path / "out", tmp_path / "again")
    jax.tree.map(np.testing.assert_array_equal, params_of(tmp_path / "again"), params_of(run))


def exported(run, folder):
    """Returns the folder of an export of the run's weights, as if they had been trained here."""
    shutil.copytree(run, folder / "run")
    shutil.rmtree(folder / "run" / "huggingface")
    export_checkpoint(folder / "run", folder / "out")
    return folder / "out"


def test_a_configuration_of_our_own_making_is_the_same_model(architecture, tmp_path):
    _, run, _ = architecture
    import_checkpoint(exported(run, tmp_path), tmp_path / "again")
    assert params_of(tmp_path / "again")[0] == params_of(run)[0]


def test_transformers_loads_an_export_and_generates_the_same_tokens(architecture, tmp_path):
    transformers = pytest.importorskip("transformers")
    _, run, golden = architecture
    load = transformers.AutoModelForCausalLM.from_pretrained
    options = {"dtype": "float32", "attn_implementation": "eager", "output_loading_info": True}
    model, report = load(exported(run, tmp_path), **options)
    assert not any(report.values()), report
    tokens = model.dummy_inputs["input_ids"].new_tensor(golden["tokens"])
    logits = model(tokens, use_cache=False).logits.detach().numpy()
    np.testing.assert_allclose(logits, golden["logits"], atol=2e-5)
    greedy = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(tokens[:, :8], attention_mask=tokens[:, :8] * 0 + 1, **greedy)
    np.testing.assert_array_equal(found[:, 8:].numpy(), golden["generated"])
