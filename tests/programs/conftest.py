"""Text to train on."""

import pytest


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"line {i}: the square is {i * i}\n" for i in range(2000)))
    return path
