"""`--help`: tyro's, with texts whose lines break at the terminal's width alone."""

import dataclasses
from typing import Annotated

import pytest
import tyro

from training.command_line import flags_of
from training.config import Config


@dataclasses.dataclass(frozen=True)
class Concern:
    """A concern."""

    inner: int = 1
    """Begins here,
    and ends here."""


@dataclasses.dataclass(frozen=True)
class Base:
    """A base."""

    inherited: int = 2
    """Begins before
    it ends."""


@dataclasses.dataclass(frozen=True)
class Flags(Base):
    """Flags."""

    concern: Annotated[Concern, tyro.conf.arg(name="")] = Concern()
    own: str = "x"
    """The first line,
    the second line."""
    without_text: int = 3


def help_of(config, capsys, monkeypatch, columns: int) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as end:
        flags_of(config, ["--help"])
    assert end.value.code == 0
    return [line.strip("│ ") for line in capsys.readouterr().out.splitlines()]


def test_help_breaks_no_line_where_the_source_does(capsys, monkeypatch):
    lines = " ".join(help_of(Flags, capsys, monkeypatch, 200))
    assert "The first line, the second line. (default: x)" in lines
    assert "Begins here, and ends here. (default: 1)" in lines
    assert "Begins before it ends. (default: 2)" in lines
    assert flags_of(Flags, ["--own", "y", "--inner", "4"]) == Flags(concern=Concern(4), own="y")


def test_the_help_of_training_fills_its_lines(capsys, monkeypatch):
    lines = help_of(Config, capsys, monkeypatch, 1000)
    assert any("Or a schedule, where each later policy begins at a step" in line for line in lines)
