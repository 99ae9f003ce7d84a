"""Results of benches: what was finished is there for the next call, whenever the last one ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lab.support.kept import Row, add_rows, read_rows

ROWS: list[Row] = [{"way": "eclip", "goodput": 1.5}, {"way": "streams", "runs": [1, 2]}]


def test_rows_are_there_for_the_next_call(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert read_rows(path) == []
    for row in ROWS:
        add_rows(path, [row])
    assert read_rows(path) == ROWS


@pytest.mark.parametrize("part", [0.1, 0.5, 1.0])
def test_a_row_that_was_being_written_as_the_bench_died_harms_no_other(
    tmp_path: Path, part: float
) -> None:
    path = tmp_path / "rows.jsonl"
    line = json.dumps(ROWS[1])
    path.write_text(json.dumps(ROWS[0]) + "\n" + line[: round(part * len(line))])
    assert read_rows(path) == ROWS[:1]
    add_rows(path, ROWS[1:])
    assert read_rows(path) == ROWS
