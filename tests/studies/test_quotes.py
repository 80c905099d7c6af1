"""studies/quotes.py: numbers in prose are those of the tables that they link to."""

import pytest

from studies import quotes
from studies.ladder import report

TABLE = "table,claim,mean,95 %,p\nfirst,H16,-0.0281,-0.0370 to -0.0204,0.0004\nsecond,H16,-0.5,-,1e-05\n"
DEFINED = '\n[a]: t.csv "-first > H16 | mean"\n[p]: t.csv "second > H16 | p"\n'


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "t.csv").write_text(TABLE)
    return tmp_path


def test_a_quote_has_the_sign_and_the_decimals_of_its_text(folder):
    text = "off [1.000 (2.000 to 3.000)][a], [+9.0][a], p = [0.5][p], [0.00000][p]" + DEFINED
    shown = "off [0.028 (0.020 to 0.037)][a], [+0.0][a], p = [0.0][p], [0.00001][p]" + DEFINED
    assert quotes.fill(text, folder) == shown
    assert quotes.fill(shown, folder) == shown


def test_tables_with_columns_of_their_own(folder):
    (folder / "t.csv").write_text(TABLE + "table,claim,loss\nthird,H16,2.5\n")
    assert quotes.fill('[1.1][x]\n[x]: t.csv "third > H16 | loss"', folder).startswith("[2.5][x]")


@pytest.mark.parametrize(
    ("title", "message"),
    [
        ("third > H16 | mean", "t.csv has no row third > H16"),
        ("first > H16 | loss", "t.csv has no column loss, only table, claim, mean"),
        ("second > H16 | mean", "has more numbers than its cell"),
    ],
)
def test_a_quote_without_a_source_is_an_error(folder, title, message):
    with pytest.raises(ValueError, match=rf"\[x\]: .*{message}"):
        quotes.fill(f'[1.0 (1.0 to 2.0)][x]\n[x]: t.csv "{title}"', folder)


def test_numbers_without_a_quote_are_found():
    text = (
        "Llama 3.1 costs 0.5 ([arXiv 2605.09825](a.md)) and `0.2`, [0.3][a], 8 to 0.75.\n| 0.1 |\n" + DEFINED
    )
    assert quotes.bare_numbers(text) == ["0.5", "0.75"]
    assert quotes.undefined(text) == {"p"}


def test_every_number_in_the_study_is_quoted_from_its_tables():
    text = report.PAGE.read_text()
    assert quotes.bare_numbers(text) == []
    assert quotes.undefined(text) == set()
