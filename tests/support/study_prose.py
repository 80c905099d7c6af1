"""Checks decimal numbers in the study's text.

They are entries of the tables under the same heading, or under headings that their paragraph links to.
"""

import re
import types
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import NamedTuple

DECIMAL = r"(?<![\w.])[+-]?\d+\.\d+(?!\w|\.\d)"
ENTRY = r"(?<![\w.])[+-]?\d+(?:\.\d+)?(?:e-?\d+)?(?!\w)"
TABLE = r"(?s)<!-- (?!end)([\w ]+) -->(.*?)<!-- end \1 -->"
INTERVAL = re.compile(
    rf"(?:({DECIMAL}), )?({DECIMAL}) to ({DECIMAL})(?:[^();]*?\bp = ({DECIMAL}))?(?=[^()]*\))"
)


class Row(NamedTuple):
    """Numbers of a row, without its first cell, which names it, or of a column, which has values alone."""

    entries: list[str]
    values: list[str]  # entries that are no bound of an interval
    ps: list[str]


class Section(NamedTuple):
    paragraphs: list[str]
    rows: list[Row]


def rows_of(table: str) -> list[Row]:
    """Rows of the tables in the text, then their columns."""
    rows, columns, header = [], [], []
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            header = []
        elif not header:
            header = cells
            columns += [Row([], [], []) for _ in header]
        elif not re.fullmatch(r"[|:\- ]+", line):
            row = Row([], [], [])
            for name, cell, column in list(zip(header, cells, columns[-len(header) :], strict=True))[1:]:
                cell = re.sub(r"(\S+) ± ([\d.]+)", with_bounds, re.sub(r"(?<=\d),(?=\d{3}\b)", "", cell))
                values = re.findall(ENTRY, re.sub(rf"{ENTRY} to {ENTRY}", "", cell))
                row.entries.extend(re.findall(ENTRY, cell))
                row.values.extend(values)
                column.values.extend(values)
                row.ps.extend(values if re.match(r"p\b", name) else re.findall(r"\bp ([\d.e-]+)", cell))
            rows.append(row)
    return rows + columns


def with_bounds(match: re.Match) -> str:
    mean, half = Decimal(match[1]), Decimal(match[2])
    return f"{match[1]} ({mean - half:+} to {mean + half:+})"


def sections_of(page: str) -> dict[str, Section]:
    """What is under each heading, by its anchor, and under '' before the first; list items are paragraphs."""
    tables = {name: rows_of(table) for name, table in re.findall(TABLE, page)}
    text = re.sub(r"(?s)```.*?```", "", re.sub(TABLE, r"\n\n<!-- \1 -->\n\n", page))
    sections = {"": Section([], [])}
    section = sections[""]
    for block in re.split(r"\n\s*\n|\n(?=- |\d+\. |\|)", text):
        block = " ".join(block.split())
        if heading := re.fullmatch(r"##+ (.*)", block):
            section = Section([], [])
            sections[re.sub(r"[^\w-]", "", heading[1].lower().replace(" ", "-"))] = section
        elif table := re.fullmatch(r"<!-- (.*) -->", block):
            section.rows.extend(tables[table[1]])
        else:
            section.paragraphs.append(block)
    return sections


def rounds_to(entry: str | Decimal, number: str) -> bool:
    """To the number's digits. A tie may go either way, because the entry is rounded itself."""
    digits = Decimal(number).as_tuple().exponent
    assert isinstance(digits, int)
    return abs(Decimal(entry) - Decimal(number)) <= Decimal(1).scaleb(digits) / 2


def is_entry(number: str, entries: Iterable[str]) -> bool:
    """With its sign if it has one, and otherwise by its magnitude."""
    if number[0] in "+-":
        return any(entry[0] in "+-" and rounds_to(entry, number) for entry in entries)
    return any(rounds_to(abs(Decimal(entry)), number) for entry in entries)


def is_interval(value: str, low: str, high: str, row: Row) -> bool:
    """Whether three neighbouring entries are these, or their opposites if the value shows no sign."""
    for entries in zip(row.entries, row.entries[1:], row.entries[2:], strict=False):
        a, b, c = (Decimal(entry) for entry in entries)
        for known in [(a, b, c)] if value[0] in "+-" else [(a, b, c), (-a, -c, -b)]:
            if all(map(rounds_to, known, (value, low, high))):
                return True
    return False


def unknown_numbers(text: str, rows: list[Row]) -> Iterator[str]:
    """What the rows do not have.

    An interval stands in one row with its value and p, a list in one row or column, a p in a column of p.
    Other numbers may be bounds of intervals only after "at most".
    """
    start = 0
    for match in INTERVAL.finditer(text):
        inside, low, high, p = match.groups()
        value = inside or next(reversed(re.findall(DECIMAL, text[start : match.start()])), None)
        start = match.end()
        if not value or not any(
            is_interval(value, low, high, row) and (not p or is_entry(p, row.ps)) for row in rows
        ):
            yield f"{value} ({match[0]})"
    text = INTERVAL.sub("", text)
    for value, p in re.findall(rf"({DECIMAL}) \(p = ({DECIMAL})\)", text):
        if not any(is_entry(value, row.values) and is_entry(p, row.ps) for row in rows):
            yield f"{value} (p = {p})"
    for ps in re.findall(rf"\bp = ({DECIMAL}(?: and {DECIMAL})?)", text):
        yield from (f"p = {p}" for p in ps.split(" and ") if not any(is_entry(p, row.ps) for row in rows))
    for bound in re.findall(rf"at most ({DECIMAL})", text):
        if not any(is_entry(bound, row.entries) for row in rows):
            yield f"at most {bound}"
    text = re.sub(rf"at most {DECIMAL}", "", text)
    for numbers in re.findall(rf"{DECIMAL}(?:(?:, | and |, and ){DECIMAL})*", text):
        if not any(all(is_entry(n, row.values) for n in re.findall(DECIMAL, numbers)) for row in rows):
            yield numbers


def wrong_numbers(
    page: str, given: Iterable[str] = (), differences: Mapping[str, tuple] = types.MappingProxyType({})
) -> list[str]:
    """What the text says and the tables do not, by section, leaving out phrases with other numbers.

    `differences` has, for a phrase, a section and, for each number of the phrase, two entries of its tables.
    """
    sections = sections_of(page)
    whole = "\n".join(paragraph for section in sections.values() for paragraph in section.paragraphs)
    wrong = [f"no text has '{phrase}'" for phrase in [*given, *differences] if phrase not in whole]
    for phrase, (source, *pairs) in differences.items():
        values = {value for row in sections[source].rows for value in row.values}
        for number, pair in zip(re.findall(DECIMAL, phrase), pairs, strict=True):
            if not values.issuperset(pair) or not rounds_to(Decimal(pair[0]) - Decimal(pair[1]), number):
                wrong.append(f"{phrase}: {number} is not {pair[0]} - {pair[1]} of '{source}'")
    for name, section in sections.items():
        for text in section.paragraphs:
            links = set(re.findall(r"\]\(#([\w-]+)\)", text))
            rows = [row for link in [name, *sorted(links - {name})] for row in sections[link].rows]
            for phrase in [*given, *differences]:
                text = text.replace(phrase, "")
            text = re.sub(r"`[^`]*`|arXiv \S+|(?<=\])\([^)]*\)", "", text)
            wrong += [f"{name}: {number}" for number in unknown_numbers(text, rows)]
    return wrong
