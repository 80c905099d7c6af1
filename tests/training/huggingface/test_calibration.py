"""Scales of activations in NVFP4: the largest inputs that transformers sees, and under the run's mask."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.exports import CONFIG, copied, weight_only
from support.llamas import imported, layer_policies, tensors

import mxjax
from analysis.diagnose.capture import make_pass
from models import decoder
from models.attention.documents import Documents
from models.configs import ExpertsConfig
from models.huggingface.files import Reader
from training.huggingface.exporting import export_checkpoint
from training.huggingface.importing import import_checkpoint


def test_nvfp4_of_activations_is_calibrated(run, tmp_path):
    """Divisors are those of the largest inputs that transformers sees, and a layer's product is `dot`'s."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    copied(run, tmp_path, format="nvfp4")
    text = tmp_path / "text"
    text.write_bytes(bytes(np.random.default_rng(1).integers(97, 123, 40, np.uint8)))
    flags = {"quantize": "nvfp4", "activations": True, "calibrate": str(text)}
    export_checkpoint(tmp_path / "run", tmp_path / "out", **flags)
    load = transformers.LlamaForCausalLM.from_pretrained
    model, report = load(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert not any(report.values()), report
    linear = {n: m for n, m in model.named_modules() if hasattr(m, "input_global_scale")}
    assert len(linear) == 11
    inputs, outputs = {}, {}
    for name, module in linear.items():
        module.register_forward_pre_hook(lambda _, x, name=name: inputs.update({name: x[0]}))
        module.register_forward_hook(lambda _, x, y, name=name: outputs.__setitem__(name, y))
        module.quantization_enabled = False
    tokens = torch.tensor([list(text.read_bytes())])
    with torch.no_grad():
        model(tokens)
        for name, module in linear.items():
            largest = float(inputs[name].abs().max())
            assert float(module.input_global_scale) == pytest.approx(2688 / largest, rel=0.03)
            module.quantization_enabled = True
        plain = outputs.copy()
        model(tokens)
    name = "model.layers.0.self_attn.q_proj"
    x, w = (t.detach().float().numpy() for t in (inputs[name][0], linear[name].weight.T))
    both = mxjax.Gemm(mxjax.Operand("nvfp4"), mxjax.Operand("nvfp4"))
    ours = np.asarray(mxjax.dot(jnp.asarray(x), jnp.asarray(w), policy=mxjax.Policy(fprop=both)))
    theirs, without = (found[name][0].float().numpy() for found in (outputs, plain))
    import_checkpoint(tmp_path / "out", tmp_path / "again")  # without the divisors of activations
    # They scale in bfloat16, so that a few activations next to a tie are rounded otherwise.
    assert np.abs(theirs - without).mean() > 10 * np.abs(theirs - ours).mean()


@pytest.mark.slow
def test_inputs_are_calibrated_under_the_mask_of_the_run(run, params, tmp_path):
    copied(run, tmp_path, format="nvfp4")
    letters = np.random.default_rng(1).integers(97, 123, 60, np.uint8)
    (tmp_path / "text").write_bytes(bytes(letters))
    path = tmp_path / "run" / "config.json"
    record, documents = json.loads(path.read_text()), {"end": ord("m"), "restart_positions": True}
    path.write_text(json.dumps(record | {"documents": documents}))
    flags = {"quantize": "nvfp4", "activations": True, "calibrate": str(tmp_path / "text")}
    export_checkpoint(tmp_path / "run", tmp_path / "out", **flags)
    found = tensors(tmp_path / "out")
    layers = layer_policies(CONFIG, weight_only(format="nvfp4"), [("blocks[-1].mlp.*", "bf16")])
    for mask, agrees in ((Documents(**documents), True), (None, False)):
        run_pass = make_pass(CONFIG, layers, None, documents=mask)
        read = run_pass(params, np.append(letters, 256)[None], jax.random.key(0)).tensors
        off = []
        for name, kind in (("q_proj", "attention.qkv"), ("o_proj", "attention.out")):
            _, raw = found[f"model.layers.1.self_attn.{name}.input_global_scale"]
            largest = np.abs(np.asarray(read[kind].x[1], np.float32)).max()
            off.append(abs(np.frombuffer(raw, np.float32)[0] * largest / 2688 - 1))
        assert (max(off) < 2**-7) == agrees, off  # two units in the last place of bfloat16


def test_nvfp4_of_experts_inputs_is_calibrated(tmp_path):
    """Divisors are those of the largest inputs of transformers' experts, the same for all of a layer."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = dataclasses.replace(CONFIG, experts=ExpertsConfig(3, 2, renormalized=True))
    imported(tmp_path, config, decoder.init(config, jax.random.key(2)))
    text = tmp_path / "text"
    text.write_bytes(bytes(np.random.default_rng(1).integers(97, 123, 40, np.uint8)))
    flags = {"quantize": "nvfp4", "activations": True, "calibrate": str(text)}
    export_checkpoint(tmp_path / "run", tmp_path / "out", **flags)
    model = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "seed")
    modules = {n: m for n, m in model.named_modules() if hasattr(m, "gate_up_proj")}
    given = {}
    for name, module in modules.items():
        module.register_forward_pre_hook(lambda _, x, name=name: given.update({name: x}))
    largest = []
    with torch.no_grad():
        model(torch.tensor([list(text.read_bytes())]))
        for name, module in modules.items():
            x, experts = given[name][:2]
            gate, up = torch.einsum("td,efd->tef", x, module.gate_up_proj).chunk(2, dim=-1)
            gated = (torch.nn.functional.silu(gate) * up).take_along_dim(experts[..., None], dim=1)
            largest.append([float(t.abs().max()) for t in (x, gated)])
    with Reader(tmp_path / "out") as reader:
        for i, (inputs, gated) in enumerate(largest):
            for j in range(3):
                for name, amax in (("w1", inputs), ("w3", inputs), ("w2", gated)):
                    module = f"model.layers.{i}.block_sparse_moe.experts.{j}.{name}"
                    divisor = float(reader.read(f"{module}.input_global_scale")[0])
                    assert divisor == pytest.approx(2688 / amax, rel=0.03), module
