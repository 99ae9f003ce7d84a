"""Tables of the documents, made from data in git when the site is built.

A page says where tables belong by a line ``<!-- made: NAME -->`` in its prose. Git has the data
and not the tables.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eclip.files import store
from eclip.reports import results

ROOT = Path(__file__).parents[1]
_MARK = re.compile(r"^<!-- made: (\S+) -->$", re.MULTILINE)


def filled(page: str) -> str:
    """The page with its tables; KeyError for a name without a maker."""
    return _MARK.sub(lambda mark: _MAKERS[mark[1]](), page)


def _comparisons() -> str:
    """As `eclip results docs/results.jsonl --markdown` prints them."""
    return results.markdown(store.load_results(ROOT / "docs/results.jsonl").comparisons)


def _faults() -> str:
    """Every planted fault, and the verdict of the last whole run of `make mutants`."""
    native = ROOT / "native" / "testing"
    sys.path.append(str(native))
    mutate: Any = importlib.import_module("mutate")
    verdicts: dict[str, str | None] = {}
    for line in (native / "mutants.jsonl").read_text().splitlines():
        verdicts.update(json.loads(line))
    return str(mutate.table(verdicts))


def _visit(path: str, heading: str, ending: str = "") -> str:
    """The tables of one visit to a GPU, a line each."""
    parts: list[str] = []
    for line in (ROOT / path).read_text().splitlines():
        table = json.loads(line)
        if not table["lines"]:
            continue
        rows = [table["columns"], ["---"] * len(table["columns"]), *table["lines"]]
        parts.append(f"{heading} {table['title']}{ending}")
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
        if table["verdicts"]:
            parts.append("\n".join(f"- {verdict}" for verdict in table["verdicts"]))
    return "\n\n".join(parts)


def _header() -> str:
    """libeclip's public header."""
    return f"```c\n{(ROOT / 'native' / 'eclip.h').read_text()}```"


_MAKERS: dict[str, Callable[[], str]] = {
    "comparisons": _comparisons,
    "faults": _faults,
    "header": _header,
    "visit-1": lambda: _visit("docs/services-tables.jsonl", "##"),
    "visit-2": lambda: _visit("docs/visit/tables.jsonl", "###", " (second visit)"),
}
