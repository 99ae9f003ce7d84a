"""Results that a bench keeps as it goes: a line of JSON for each, so that a second call goes on.

A bench may be killed while it writes. What it had not finished is as if it had not been there.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

_ONE_AT_A_TIME = threading.Lock()


def read_rows(path: Path) -> list[Row]:
    """None, if nothing was kept yet."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in _whole(path.read_bytes()).splitlines()]


def add_rows(path: Path, rows: Iterable[Row]) -> None:
    with _ONE_AT_A_TIME, path.open("a+b") as file:
        file.seek(0)
        file.truncate(len(_whole(file.read())))
        file.write("".join(json.dumps(row) + "\n" for row in rows).encode())


def _whole(content: bytes) -> bytes:
    """Without a last line that has no end."""
    return content[: content.rfind(b"\n") + 1]
