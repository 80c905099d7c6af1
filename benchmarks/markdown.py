"""Documents with generated text between markers."""

import re


def insert(text: str, named: dict[str, str]) -> str:
    """Replaces the text between each pair of markers `<!-- NAME -->` and `<!-- end NAME -->`."""
    for name, content in named.items():
        start, end = f"<!-- {name} -->", f"<!-- end {name} -->"
        text, count = re.subn(
            f"{start}.*?{end}", lambda _, c=content, s=start, e=end: f"{s}\n{c}\n{e}", text, flags=re.S
        )
        if count != 1:
            raise ValueError(f"insert needs one pair of markers {name!r}, the document has {count}")
    return text
