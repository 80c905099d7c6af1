"""Exports in MXFP4: the values that the Fprop multiplies, loaded by transformers and imported again."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.exports import CONFIG, copied, set_policy, weight_only
from support.llamas import imported, layer_policies, logits_of, params_of, tensors, write
from support.marks import parametrize

import mxjax
from models import decoder
from models.configs import ExpertsConfig, get_config
from models.huggingface.config import write_config
from models.huggingface.files import Reader, Spec
from models.huggingface.gguf_file import write_gguf
from models.huggingface.quantized import choose_operands, quantized_weights
from training.huggingface.exporting import export_checkpoint
from training.huggingface.importing import import_checkpoint


@parametrize(
    "rhs",
    {},
    slow=[
        {"format": "nvfp4", "scale_max": 256, "four_over_six": "mse"},
        {"scale_rule": "even"},
        {"block_shape": (32, 32)},
        {"block_shape": 64},
        {"format": "nvfp4"},
        {"format": "nvfp4", "block_shape": (16, 16)},
    ],
)
def test_exported_values_are_those_that_the_fprop_multiplies(params, rhs):
    """The identity is exact in bfloat16, so its product with a weight is the weight as the Fprop reads it.

    NVFP4's divisor is rounded to float32, and so is its inverse.
    """
    policy, number = weight_only(**rhs), rhs.get("format", "mxfp4")
    layers = layer_policies(CONFIG, policy, [("head", policy)])
    found = dict(quantized_weights(CONFIG, params, choose_operands(CONFIG, layers, None, number)[0]))
    assert len(found) == 15

    def multiplied(w):
        return np.asarray(mxjax.dot(jnp.eye(len(w)), jnp.asarray(w), policy=policy)).T

    attention, mlp = params["blocks"]["attention"], params["blocks"]["mlp"]
    qkv = multiplied(attention["qkv"][1]).reshape(2, 4, 32, 64)  # two groups of two queries, key, value
    expected = {
        "model.layers.1.self_attn.q_proj": qkv[:, :2].reshape(-1, 64),
        "model.layers.1.self_attn.k_proj": qkv[:, 2].reshape(-1, 64),
        "model.layers.1.mlp.up_proj": multiplied(mlp["gate_up"][1])[96:],
        "model.layers.0.mlp.down_proj": multiplied(mlp["down"][0]),
        "lm_head": multiplied(params["head"]),
    }
    for name, values in expected.items():
        rounded = 0 if number == "mxfp4" else 2**-22
        np.testing.assert_allclose(found[name].values(), values, rtol=rounded, err_msg=name)


@parametrize(
    ("name", "rhs"),
    ("mxfp4", {}),
    ("mxfp4", {"scale_rule": "even"}),
    ("quark", {}),
    ("nvfp4", {"format": "nvfp4"}),
    slow=[("nvfp4", {"format": "nvfp4", "block_shape": (16, 16)})],
)
def test_export_import_export_gives_the_same_bytes(run, tmp_path, name, rhs):
    """NVFP4's divisors may differ in their last bit, since the values are rounded to float32."""
    run = copied(run, tmp_path, **rhs)
    export_checkpoint(run, tmp_path / "out", quantize=name, activations=name == "quark")
    import_checkpoint(tmp_path / "out", tmp_path / "again")
    set_policy(tmp_path / "again", weight_only(**rhs))
    export_checkpoint(tmp_path / "again", tmp_path / "once more", quantize=name)
    first, second = tensors(tmp_path / "out"), tensors(tmp_path / "once more")
    divisors = [n for n in first if n.endswith("weight_global_scale")]
    assert bool(divisors) == (name == "nvfp4")
    for n in divisors:
        one, other = (np.frombuffer(found.pop(n)[1], np.float32) for found in (first, second))
        np.testing.assert_array_max_ulp(one, other, maxulp=1)
    assert first == second
    export_checkpoint(tmp_path / "again", tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())


@parametrize(  # with norms of queries and keys it is Qwen3-MoE, else Mixtral
    ("name", "qk_norm"),
    slow=[("nvfp4", False), ("mxfp4", True)],
    exhaustive=[("mxfp4", False), ("nvfp4", True)],
)
def test_each_expert_is_packed(qk_norm, name, tmp_path):
    """Each has the values that `ragged_dot` multiplies, and transformers finds all it looks for.

    Qwen3-MoE's first block has an MLP.

    transformers 5.24 drops the divisors of NVFP4's experts.
    """
    experts = ExpertsConfig(3, 2, renormalized=True)
    dense = (128, 0) if qk_norm else ()
    config = dataclasses.replace(CONFIG, experts=experts, qk_norm=qk_norm, dense_d_ff=dense)
    params = decoder.init(config, jax.random.key(2))
    imported(tmp_path, config, params)
    export_checkpoint(tmp_path / "run", tmp_path / "out", quantize=name)
    import_checkpoint(tmp_path / "out", tmp_path / "again")
    w = jnp.asarray(params["blocks"]["mlp"]["down"][-1])
    rows = jnp.tile(jnp.eye(w.shape[1]), (len(w), 1))
    policy = weight_only(format=name)
    multiplied = mxjax.ragged_dot(rows, w, np.full(len(w), w.shape[1]), policy=policy)
    found = params_of(tmp_path / "again")[1]["blocks"]["mlp"]["down"][-1]
    rounded = 0 if name == "mxfp4" else 2**-22
    np.testing.assert_allclose(found, np.reshape(multiplied, w.shape), rtol=rounded)
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, report = load(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert not any(report.values()), report
    if name == "nvfp4":
        return
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (1, 20))
    theirs = model(model.dummy_inputs["input_ids"].new_tensor(tokens)).logits.detach().float().numpy()
    ours = logits_of(*params_of(tmp_path / "again"), tokens)
    assert np.abs(theirs - ours).mean() < 0.02 * np.abs(ours).max()


def test_unrepresentable_fprops_are_refused():
    for change, message in [
        (mxjax.Gemm(rotation=mxjax.Rotation(16)), "rotates weights by H16"),
        (mxjax.Gemm(rhs=mxjax.Operand(rounding="stochastic")), "stochastically"),
        (mxjax.Gemm(rhs=mxjax.Operand(prescale=0.75)), "prescale"),
    ]:
        layers = layer_policies(CONFIG, mxjax.Policy(fprop=change))
        with pytest.raises(ValueError, match=message):
            choose_operands(CONFIG, layers, None)
        assert choose_operands(CONFIG, layers, "floor")[0]["blocks.0.mlp.down"] == mxjax.Operand()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"activations": True}, "add --quantize mxfp4"),
        ({"quantize": "mxfp4", "dtype": "float32"}, "loaders compute quantized models in bfloat16"),
        ({"quantize": "gguf", "activations": True}, "is not for --quantize gguf"),
        ({"quantize": "gguf", "shard_gb": 1.0}, "--shard-gb 1: --quantize gguf writes one file"),
        ({"quantize": "gguf"}, "needs a tokenizer"),
        ({"quantize": "nvfp4", "activations": True}, "add --calibrate PREFIX"),
        ({"quantize": "nvfp4", "activations": True, "calibrate": "~/none"}, "--calibrate /.*none: no such"),
        ({"quantize": "nvfp4", "scale_rule": "even"}, "leave it out with nvfp4"),
    ],
)
def test_flags_that_cannot_be_are_refused(run, tmp_path, flags, message):
    if flags.get("quantize") == "gguf":
        pytest.importorskip("gguf")
    with pytest.raises(ValueError, match=message):
        export_checkpoint(run, tmp_path / "out", **flags)
    assert list(tmp_path.iterdir()) == []


def test_a_chat_template_that_is_no_text_is_refused(run, tmp_path):
    pointer = tmp_path / "chat.jinja"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 16\n")
    with pytest.raises(ValueError, match=r"--chat-template .*chat\.jinja is a pointer of git-lfs"):
        export_checkpoint(run, tmp_path / "out", chat_template=pointer)
    assert list(tmp_path.iterdir()) == [pointer]


def test_other_schemes_and_damaged_tensors_are_refused(run, tmp_path):
    export_checkpoint(run, tmp_path / "out", quantize="mxfp4")
    path = tmp_path / "out" / "config.json"
    raw = json.loads(path.read_text())
    for change, message in [
        ({"quant_method": "gptq"}, "quant_method 'gptq'"),
        ({"config_groups": {"group_0": {"format": "int-quantized", "weights": {}}}}, "int-quantized"),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, "num_bits 8"),
        (
            {"config_groups": {"group_0": {"format": ["mxfp4-pack-quantized"], "weights": {}}}},
            "is not supported",
        ),
        ({"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}, "with transform_config"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "with sparsity_config"),
    ]:
        path.write_text(json.dumps(raw | {"quantization_config": raw["quantization_config"] | change}))
        with pytest.raises(ValueError, match=message):
            import_checkpoint(tmp_path / "out", tmp_path / "again")
    path.write_text(json.dumps(raw))
    with Reader(tmp_path / "out") as reader:
        values = {name: (spec, reader.read(name)) for name, spec in reader.specs.items()}
    name = "model.layers.0.mlp.up_proj."
    scales, twice = values[name + "weight_scale"][1], np.zeros((96, 64), np.float32)
    for damaged, message in [
        ({"weight_scale": (Spec("U8", (96, 1)), scales[:, :1])}, r"weight_scale is \['U8', 96, 1\]"),
        ({"weight_scale": (Spec("U8", (192,)), scales.reshape(-1))}, r"weight_scale is \['U8', 192\]"),
        ({"weight": (Spec("F32", (96, 64)), twice)}, "has both weight and weight_packed"),
    ]:
        changed = values | {name + part: tensor for part, tensor in damaged.items()}
        write(tmp_path / "out", changed)
        with pytest.raises(ValueError, match=message):
            import_checkpoint(tmp_path / "out", tmp_path / "again")
    weights = tmp_path / "out" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="truncated"):
        import_checkpoint(tmp_path / "out", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_divisor_that_changes_signs_or_clears_a_matrix_is_refused(run, tmp_path):
    copied(run, tmp_path, format="nvfp4")
    export_checkpoint(tmp_path / "run", tmp_path / "out", quantize="nvfp4")
    name = "model.layers.0.mlp.up_proj.weight_global_scale"
    with Reader(tmp_path / "out") as reader:
        values = {n: (spec, reader.read(n)) for n, spec in reader.specs.items()}
    for divisor in (-1.0, 0.0, np.inf, np.nan):
        values[name] = values[name][0], np.array([divisor], np.float32)
        write(tmp_path / "out", values)
        with pytest.raises(ValueError, match=f"{name} must be positive and finite, got {divisor}"):
            import_checkpoint(tmp_path / "out", tmp_path / "again")
        assert not (tmp_path / "again").exists()


def test_a_tied_head_and_layers_without_mxfp4_stay():
    config = dataclasses.replace(CONFIG, tied=True)
    head, down = mxjax.get_policy("weight_only"), "blocks.0.mlp.down"
    layers = layer_policies(config, "bf16", [("head", head), (down, head)])
    operands, line = choose_operands(config, layers, None)
    assert (list(operands), "tied" in line) == ([down], True)
    layers = layer_policies(config, "fp8")
    operands, line = choose_operands(config, layers, "even")
    assert len(operands) == 8
    assert "rounded to nearest now, scale rule even" in line


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (get_config("gpt-oss-20b"), "writes llama, mixtral, qwen3_moe, not gpt_oss; use --quantize mxfp4"),
        (
            dataclasses.replace(get_config("qwen3-30b-a3b"), dense_d_ff=(6144, *(0,) * 47)),
            "blocks without experts, which llama.cpp's qwen3moe lacks; use",
        ),
        (dataclasses.replace(get_config("tiny"), qkv_bias=True, out_bias=True), "does not write biases; use"),
    ],
)
def test_models_that_llama_cpp_would_run_otherwise_are_refused(config, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        write_gguf(None, tmp_path / "model.gguf", config, {}, {}, {})
    assert not [*tmp_path.iterdir()]


def test_gguf_reads_what_the_fprop_multiplies(run, params, tmp_path):
    """The package's reader and dequantizer give our values, rows of query and key in pairs of channels."""
    gguf = pytest.importorskip("gguf")
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "huggingface").mkdir()
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    tokenizer = {"model": model, "pre_tokenizer": {"type": "ByteLevel"}, "added_tokens": []}
    (tmp_path / "run" / "huggingface" / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "run" / "huggingface" / "config.json").write_text(json.dumps(write_config(CONFIG, 64)))
    export_checkpoint(tmp_path / "run", tmp_path / "out", quantize="gguf")
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    read = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    kinds = {t.name: t.tensor_type.name for t in reader.tensors}
    assert kinds["blk.0.ffn_down.weight"] == "MXFP4"
    assert kinds["blk.1.ffn_down.weight"] == kinds["output.weight"] == "BF16"
    assert kinds["output_norm.weight"] == "F32"
    policies = layer_policies(CONFIG, "weight_only", [("blocks[-1].mlp.*", "bf16")])
    found = dict(quantized_weights(CONFIG, params, choose_operands(CONFIG, policies, None)[0]))
    down = found["model.layers.0.mlp.down_proj"].values()
    np.testing.assert_array_equal(read["blk.0.ffn_down.weight"], down)
    query = found["model.layers.1.self_attn.q_proj"].values().reshape(4, 2, 16, 64)
    pairs = read["blk.1.attn_q.weight"].reshape(4, 16, 2, 64)
    np.testing.assert_array_equal(pairs[:, :, 0], query[:, 0])
    np.testing.assert_array_equal(pairs[:, :, 1], query[:, 1])
    field = reader.fields["tokenizer.ggml.tokens"]
    assert [bytes(field.parts[i]).decode() for i in field.data][2:4] == ["ab", "[PAD3]"]
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    load = transformers.LlamaForCausalLM.from_pretrained
    loaded = load(tmp_path / "out", gguf_file="model.gguf", dtype=torch.float32)
    for name in ("model.layers.1.self_attn.q_proj", "model.layers.0.self_attn.k_proj"):
        np.testing.assert_array_equal(loaded.get_submodule(name).weight.detach(), found[name].values())


def test_transformers_loads_what_the_fprop_multiplies(run, params, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    export_checkpoint(run, tmp_path / "out", quantize="mxfp4")
    load = transformers.LlamaForCausalLM.from_pretrained
    model, report = load(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert not any(report.values()), report
    found = dict(quantized_weights(CONFIG, params, choose_operands(CONFIG, None, None)[0]))
    model(model.dummy_inputs["input_ids"] % CONFIG.vocab_size)  # the first pass unpacks
    weight = model.get_submodule(name := "model.layers.0.mlp.down_proj").weight.float().detach().numpy()
    np.testing.assert_array_equal(weight, found[name].values())
