"""Evaluation sets: names, the bytes of their targets beside the package tokenizers, and bits per byte."""

import json
import math

import numpy as np
import pytest
import tokenizers
from support.runs import lines, run
from tokenizers import decoders, models, pre_tokenizers, trainers

import eval as evaluation_program
from training.data.evaluation_sets import parse_eval_data
from training.data.tokenizer import token_bytes_of

TEXT = "Zwölf Boxkämpfer, 12 naïve cafés —\n\tdef f(x): return 'ßüß' + \"漢字 and 🤖\"  # twice  \n" * 3


def byte_level():
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    end = ["<|endoftext|>"]
    made.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=end)
    )
    return made


def byte_fallback():
    """Llama 2's kind: spaces are ▁, characters that no token has are bytes."""
    names = ["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"▁abcdefnrtuxwicodö", "de", "def"]
    merges = [("d", "e"), ("de", "f")]
    vocabulary = {name: i for i, name in enumerate(dict.fromkeys(names))}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    made.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(parts)
    made.add_special_tokens(["</s>"])
    return made


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_bytes_of_tokens_are_those_of_the_text_that_the_package_decodes(make, tmp_path):
    tokenizer, path = make(), tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    ids = tokenizer.encode(TEXT).ids
    sizes = token_bytes_of(path, 512)
    assert tokenizer.decode(ids) == TEXT
    assert sizes.shape == (512,)
    assert sizes[ids].sum() == len(TEXT.encode())
    ends = [i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    assert sizes[ends].tolist() == [0] * len(ends) != []


def test_a_tokenizer_that_loses_bytes_gives_none(tmp_path):
    tokenizer = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert token_bytes_of(tmp_path / "tokenizer.json", 2) is None


@pytest.mark.slow
def test_sets_have_names_and_the_first_decides(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("one two three four\n" * 300)
    files = {"code": tmp_path / "code.py", "web": tmp_path / "web"}
    files["code"].write_text("def f(x): return x\n" * 40)
    files["web"].mkdir()
    for i in range(40):
        (files["web"] / f"{i}.txt").write_text("über ")
    flags = [f"{name}={path}" for name, path in files.items()]
    loss = ["--target-loss", "100", "--eval-every", "2"]
    result = run(text, tmp_path / "run", "--policy", "bf16", *loss, "--eval-data", *flags)
    said = capsys.readouterr().out
    *_, last = lines(tmp_path / "run")
    assert last["step"] == 2
    assert (
        last["eval_loss"] == last["eval_sets"]["code"]["eval_loss"] != last["eval_sets"]["web"]["eval_loss"]
    )
    assert result == {name: value for name, value in last.items() if name not in ("step", "tokens")}
    assert "final code: eval loss" in said
    assert "; web: eval loss" in said
    evaluation_program.main([str(tmp_path / "run"), "--json"])
    assert json.loads(capsys.readouterr().out)["eval_sets"] == last["eval_sets"]
    evaluation_program.main([str(tmp_path / "run"), "--json", "--eval-data", f"x={files['web']}"])
    assert json.loads(capsys.readouterr().out)["eval_sets"] == {"x": last["eval_sets"]["web"]}
    web = last["eval_sets"]["web"]
    stream = np.frombuffer((b"\xc3\xbcber \0" * 40)[: web["eval_tokens"] + 1], np.uint8)
    assert web["eval_bytes"] == np.sum(stream[1:] > 0)  # without ends of documents
    bits = web["eval_loss"] * web["eval_tokens"] / math.log(2)
    assert web["eval_bits_per_byte"] == pytest.approx(bits / web["eval_bytes"], rel=1e-12)


@pytest.mark.parametrize("values", [["a", "b"], ["x=a", "b"], ["x=a", "x=b"], ["x="], [""]])
def test_several_sets_need_different_names(values):
    with pytest.raises(ValueError, match=r"NAME=PATH for each of several|got an empty name"):
        parse_eval_data(values)
    assert parse_eval_data(["/runs/lr=3/text"]) == {"": "/runs/lr=3/text"}


def test_an_error_says_what_a_name_may_hold_and_which_value_is_none():
    with pytest.raises(ValueError, match=r"names of letters, digits, _, - and \.; got a=x 'b c=y'"):
        parse_eval_data(["a=x", "b c=y"])
