"""Results that a bench keeps as it goes: a line of JSON for each, so that a second call goes on."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """None, if nothing was kept yet."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def add_rows(path: Path, rows: Iterable[Row]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
