"""The README's examples run as they stand, and the links of all documents lead somewhere."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")]
DOCUMENTS += sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)


def run_examples(text: str) -> dict:
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, names)
    return names


@pytest.mark.slow
def test_the_examples_run():
    names = run_examples(README)
    assert names["dw"].shape == (512, 2048)
    assert names["y"].shape == (4, 128, 2048)
    assert names["layer"](names["x"]).shape == (4, 128, 2048)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["getting-started", "integration", "gradients"])
def test_the_examples_of_the_documentation_run(page):
    assert run_examples((ROOT / "docs" / f"{page}.md").read_text())


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 130


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path):
    links = re.findall(r"\]\(([^)#\s]+)", path.read_text())
    local = [link for link in links if "://" not in link]
    assert not [link for link in local if not (path.parent / link).exists()]


def test_the_map_names_what_there_is():
    described = (ROOT / "CONTRIBUTING.md").read_text().split("## Map")[1].split("```")[1]
    lines = described.strip().splitlines()
    assert len(lines) <= 20
    for name in re.findall(r"^([\w./]+)", described, re.MULTILINE):
        assert (ROOT / name).exists(), name
