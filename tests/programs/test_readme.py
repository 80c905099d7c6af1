"""The README's examples run as they stand, and the links of all documents lead somewhere."""

import functools
import itertools
import pathlib
import re
import shlex

import pytest

import mxjax
from models import decoder
from models.configs import get_config
from mxjax.recipes import __main__ as recipes
from mxjax.runtime.tables import insert
from training.command_line import parse
from training.phases import expand, phases_of
from training.sharding import check_batch, parse_mesh

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")]
DOCUMENTS += sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)

PRECISION = {"--policy", "--set", "--layers", "--scale-rule"}


def run_examples(text: str) -> dict:
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, names)
    return names


@pytest.mark.slow
def test_the_examples_run():
    names = run_examples(README)
    assert names["dw"].shape == (512, 2048)
    assert names["layer"](names["x"]).shape == (4, 128, 2048)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["getting-started", "integration", "gradients"])
def test_the_examples_of_the_documentation_run(page):
    assert run_examples((ROOT / "docs" / f"{page}.md").read_text())


def test_pasted_code_is_that_of_the_examples():
    text = (ROOT / "docs" / "integration.md").read_text()
    pasted = re.findall(r"From \[(\S+)\]\((\S+)\):\n\n```py\n(.*?)\n```", text, re.DOTALL)
    assert len(pasted) >= 2
    for name, link, code in pasted:
        assert code in (ROOT / "docs" / link).read_text(), name


def test_the_table_of_recipes_is_generated():
    text = (ROOT / "docs" / "policies.md").read_text()
    written = insert(text, {"recipes": recipes.published_table()})
    assert written == text, "run python -m mxjax.recipes --write docs/policies.md"


def test_documents_are_short():
    assert len(README.split()) <= 700
    assert sum(len(path.read_text().split()) for path in DOCUMENTS) <= 19_200


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path):
    links = re.findall(r"\]\(([^)#\s]+)", path.read_text())
    local = [link for link in links if "://" not in link]
    assert not [link for link in local if not (path.parent / link).exists()]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_rows_follow_the_head_of_their_table(path):
    """A blank line ends a table, and rows after it are shown as text."""
    for block in re.findall(r"(?:^\|.*\n)+", path.read_text(), re.MULTILINE):
        assert re.fullmatch(r"\|[-:| ]+\|", block.splitlines()[1]), block.splitlines()[0]


def is_of_precision(word: str) -> bool:
    return word.partition("=")[0] in PRECISION


def precision_flags(text: str) -> list[list[str]]:
    """Returns the flags that say a run's precision, of each command and of code in running text."""
    fence = r"```.*?```"
    blocks = "\n".join(re.findall(fence, text, re.DOTALL)).replace("\\\n", " ")
    found = []
    for code in blocks.splitlines() + re.findall(r"`([^`]+)`", re.sub(fence, "", text, flags=re.DOTALL)):
        if any(flag in code for flag in PRECISION):
            rest = itertools.dropwhile(lambda w: not is_of_precision(w), shlex.split(code, comments=True))
            found.append(
                list(itertools.takewhile(lambda w: is_of_precision(w) or not w.startswith("--"), rest))
            )
    return found


def test_flags_of_precision_in_the_documents_are_understood(tmp_path, monkeypatch):
    texts = [path.read_text() for path in DOCUMENTS if path.stem not in ("CONTRIBUTING", "CHANGELOG")]
    found = [flags for text in texts for flags in precision_flags(text)]
    commands = [flags for flags in found if len(flags) > 1 or "=" in "".join(flags)]  # not names alone
    assert len(commands) > 10
    monkeypatch.chdir(tmp_path)
    pathlib.Path("recipes").mkdir()
    for name in ("own.json", "head.json", "own.py", "recipes/own.py"):
        policy = mxjax.policy_to_json(mxjax.get_policy("wgrad")) if "json" in name else "policy = 'wgrad'"
        pathlib.Path(name).write_text(policy)
    layers = functools.partial(decoder.layer_policies, get_config("tiny"))
    for flags in commands:
        config = expand(parse(flags))
        assert phases_of(config.precision, config.steps, layers), flags


def test_meshes_in_the_documents_share_the_batch():
    commands = []
    for path in DOCUMENTS:
        for found in re.findall(r"train\.py ([^`\n]*--mesh[^`\n]*)", path.read_text().replace("\\\n", " ")):
            commands.append(parse(shlex.split(found.replace("$RESUME", ""))))
    assert len(commands) >= 2
    for config in commands:
        check_batch(parse_mesh(config.mesh, None), config.data.batch_size, config.accumulate)


def test_the_map_names_what_there_is():
    described = (ROOT / "CONTRIBUTING.md").read_text().split("## Map")[1].split("```")[1]
    lines = described.strip().splitlines()
    assert len(lines) <= 10
    for name in re.findall(r"^([\w./]+)", described, re.MULTILINE):
        assert (ROOT / name).exists(), name
