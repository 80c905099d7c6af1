"""The README's examples run as they stand."""

import pathlib
import re

README = (pathlib.Path(__file__).parents[2] / "README.md").read_text()


def test_the_examples_run():
    names = {}
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(block, names)
    assert names["dw"].shape == (1024, 4096)
    assert names["y"].shape == (8, 512, 4096)


def test_the_map_names_what_there_is():
    described = README.split("## Map")[1].split("```")[1]
    root = pathlib.Path(__file__).parents[2]
    for name in re.findall(r"^(\S+/?)(?: (\S+\.py))?", described, re.MULTILINE):
        assert all((root / part).exists() for part in name if part)
