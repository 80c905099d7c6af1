"""Exports as other people's software runs them, against our own evaluation of the run."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest
from support.llamas import layer_policies, rewrite_params

import eval as evaluation_program
from analysis.sample import SampleConfig
from models import decoder
from models.configs import DecoderConfig, ExpertsConfig, RopeScaling
from training.data.tokenizer import END_OF_DOCUMENT
from training.huggingface.exporting import export_checkpoint
from training.huggingface.importing import import_checkpoint

CONFIG = DecoderConfig(300, 64, 2, 4, 2, 32, 96, rope_theta=10_000.0, init_std=0.2)
POLICIES = layer_policies(CONFIG, "weight_only")
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
PROMPT, LENGTH = "line 7: the square", 12
TASK = pathlib.Path(__file__).parents[2] / "support" / "lm_eval_task"


@pytest.fixture(scope="module")
def params():
    return decisive_params(CONFIG)


def decisive_params(config):
    """Returns random weights, but the head makes token i probable after each j with 1 + 7 j % 89 = i.

    So the most probable token is far ahead, and it is a printable one.
    """
    found = jax.tree.map(np.array, decoder.init(config, jax.random.key(0)))
    embedding, head = found["embedding"], found["head"]
    head[...] = 0
    np.add.at(head.T, 1 + 7 * np.arange(len(embedding)) % 89, embedding)
    return found


@pytest.fixture(scope="module")
def tokenizer():
    """A byte-level BPE of a few lines, with the token that ends a document."""
    library = pytest.importorskip("tokenizers")
    found = library.Tokenizer(library.models.BPE())
    found.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = library.decoders.ByteLevel()
    alphabet = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    trainer = library.trainers.BpeTrainer(
        vocab_size=CONFIG.vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    found.train_from_iterator([f"line {i}: the square is {i * i}." for i in range(200)], trainer)
    return found


@pytest.fixture(scope="module")
def run(params, tokenizer, tmp_path_factory):
    return import_model(tmp_path_factory.mktemp("runs"), CONFIG, params, tokenizer)


def import_model(folder, config, params, tokenizer):
    """Returns the run of an imported model."""
    (folder / "seed").mkdir()
    rewrite_params(folder / "seed", config, params)
    tokenizer.save(str(folder / "seed" / "tokenizer.json"))
    file = folder / "seed" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"bos_token_id": 0, "eos_token_id": 0}))
    ends = dict.fromkeys(("bos_token", "eos_token"), END_OF_DOCUMENT)
    ends["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "seed" / "tokenizer_config.json").write_text(json.dumps(ends))
    import_checkpoint(folder / "seed", folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def continued(run):
    """The most probable continuation by `eval.py sample --policy weight_only`."""
    flags = {"prompt": PROMPT, "tokens": LENGTH, "temperature": 0.0, "policy": "weight_only", "json": True}
    return evaluation_program.sample(SampleConfig(run, **flags))["text"]


def logits_of(params, ids, config=CONFIG):
    policies = layer_policies(config, "weight_only")
    return np.asarray(decoder.apply(config, params, np.asarray(ids)[None], policies=policies))[0]


def test_transformers_continues_a_text_as_eval_does(run, params, continued, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    export_checkpoint(run, tmp_path / "out", quantize="mxfp4")
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, report = load(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert not any(report.values()), report
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    found = model.generate(**theirs(PROMPT, return_tensors="pt"), max_new_tokens=LENGTH, do_sample=False)
    assert theirs.decode(found[0]) == PROMPT + continued
    with torch.no_grad():
        logits = model(found).logits[0].float().numpy()
    ours = logits_of(params, found[0])
    np.testing.assert_allclose(logits, ours, atol=0.03 * np.abs(ours).max())  # bfloat16


def test_llama_cpp_continues_it_within_its_8_bits(run, params, continued, tmp_path):
    """Its products of MXFP4 round activations to 8 bits: twice the error of bfloat16 here."""
    llama_cpp = pytest.importorskip("llama_cpp")
    export_checkpoint(run, tmp_path / "out", quantize="gguf")
    model = llama_cpp.Llama(str(tmp_path / "out" / "model.gguf"), n_ctx=64, logits_all=True, verbose=False)
    found = model.create_completion(PROMPT, max_tokens=LENGTH, temperature=0.0)
    assert found["choices"][0]["text"] == continued
    ids, n = model._input_ids, model.n_tokens
    ours = logits_of(params, ids)
    np.testing.assert_allclose(model.scores[:n], ours, atol=0.08 * np.abs(ours).max())
    model.close()


def test_llama_cpp_runs_an_imported_llama_3(params, tokenizer, tmp_path):
    """Its frequencies are scaled; its tokenizer splits text by Llama 3's pattern and begins with a token."""
    llama_cpp, library = pytest.importorskip("llama_cpp"), pytest.importorskip("tokenizers")
    config = dataclasses.replace(CONFIG, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 16))
    tokenizer = library.Tokenizer.from_str(tokenizer.to_str())
    split = library.pre_tokenizers.Split(library.Regex(LLAMA3), "isolated")
    whole = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence([split, whole])
    begin = {"single": f"{END_OF_DOCUMENT} $A", "special_tokens": [(END_OF_DOCUMENT, 0)]}
    tokenizer.post_processor = library.processors.TemplateProcessing(**begin)
    run, template = import_model(tmp_path, config, params, tokenizer), tmp_path / "template"
    template.write_text("{{ messages[0].content }}")
    export_checkpoint(run, tmp_path / "out", quantize="gguf", chat_template=template)
    model = llama_cpp.Llama(str(tmp_path / "out" / "model.gguf"), n_ctx=64, logits_all=True, verbose=False)
    assert model.metadata["tokenizer.chat_template"] == template.read_text()
    text = "line 12345: it's  the\n\nsquare, 100 Ünits"
    ids = model.tokenize(text.encode())
    assert ids == tokenizer.encode(text).ids
    model.eval(ids)
    ours, plain = logits_of(params, ids, config), logits_of(params, ids)
    error = np.abs(model.scores[: len(ids)] - ours)
    model.close()
    assert error.max() < 0.08 * np.abs(ours).max()
    assert error.mean() < 0.2 * np.abs(plain - ours).mean()


@pytest.mark.parametrize("qk_norm", [False, True], ids=["mixtral", "qwen3_moe"])
def test_llama_cpp_runs_experts(tokenizer, tmp_path, qk_norm):
    """A router next to a tie may choose another expert, so that a few tokens may differ more."""
    llama_cpp = pytest.importorskip("llama_cpp")
    config = dataclasses.replace(CONFIG, experts=ExpertsConfig(4, 2, renormalized=True), qk_norm=qk_norm)
    params = decisive_params(config)
    export_checkpoint(import_model(tmp_path, config, params, tokenizer), tmp_path / "out", quantize="gguf")
    model = llama_cpp.Llama(str(tmp_path / "out" / "model.gguf"), n_ctx=64, logits_all=True, verbose=False)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, 60).tolist()
    model.eval(ids)
    ours = logits_of(params, ids, config)
    error = np.abs(model.scores[: len(ids)] - ours).max(axis=1)
    model.close()
    assert np.median(error) < 0.08 * np.abs(ours).max(), (np.sort(error), np.abs(ours).max())


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:You passed .quantization_config.:UserWarning"
)  # lm_eval does, of the config
def test_lm_eval_measures_our_loss(run, params, tokenizer, tmp_path, monkeypatch):
    lm_eval = pytest.importorskip("lm_eval")
    monkeypatch.chdir(TASK.parents[2])
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    export_checkpoint(run, tmp_path / "out", quantize="mxfp4")
    tasks = pytest.importorskip("lm_eval.tasks").TaskManager(include_path=str(TASK), include_defaults=False)
    flags = {"model_args": {"pretrained": str(tmp_path / "out")}, "tasks": ["squares"], "device": "cpu"}
    found = lm_eval.simple_evaluate(model="hf", task_manager=tasks, bootstrap_iters=0, **flags)
    texts = [json.loads(line)["text"] for line in (TASK / "squares.jsonl").read_text().splitlines()]
    batches = [np.array([[0, *tokenizer.encode(text).ids]]) for text in texts]
    ours = [float(decoder.losses(CONFIG, params, batch, policies=POLICIES).sum()) for batch in batches]
    theirs = found["results"]["squares"]["byte_perplexity,none"]
    assert np.log(theirs) == pytest.approx(sum(ours) / len("".join(texts)), rel=0.005)
