"""The file of a diagnosis."""

import json
import pathlib
from typing import Any

FILE = "diagnosis.json"


def read(folder: pathlib.Path) -> dict[str, Any] | None:
    """Returns the record in a folder, None if there is none."""
    path = folder / FILE
    return json.loads(path.read_text()) if path.exists() else None
