"""Fixtures of the tests of tokenization."""

import pytest


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Returns a folder of three files and their texts in order."""
    from support.tokenizing import write_files

    folder = tmp_path_factory.mktemp("corpus")
    return folder, write_files(folder, 3, 40)


@pytest.fixture(scope="module")
def tokenizer(corpus, tmp_path_factory):
    """Returns the file of a tokenizer that was trained on the corpus."""
    from training.tokenize.tokenize import train_tokenizer

    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    files = sorted(map(str, corpus[0].iterdir()))
    path.write_text(train_tokenizer(files, "text", 300, 10**6))
    return path


@pytest.fixture
def here(monkeypatch):
    """Makes the parts in this process: starting others takes seconds each."""
    from support.tokenizing import make_here

    make_here(monkeypatch)
