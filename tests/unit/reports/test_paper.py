"""docs/paper.md has the tables and picture of the stored rows; a run gives a row again."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab.paper import PAGE, PICTURE, ROWS, compare, device, example, filled, tables_of
from lab.support.kept import read_rows
from lab.support.paper_picture import draw_paper


def test_tables_and_picture_are_those_of_the_stored_rows(tmp_path: Path) -> None:
    rows = read_rows(ROWS)
    page = PAGE.read_text()
    assert filled(page, tables_of(rows)) == page, "make them again: lab/paper.py --draw"
    drawn = tmp_path / "paper.svg"
    draw_paper([row for row in rows if row["part"] == "picture"]).save(drawn)
    assert drawn.read_text() == PICTURE.read_text()


def test_the_worked_example_costs_what_the_page_says() -> None:
    kept = [row for row in read_rows(ROWS) if row["part"] == "example"]
    assert [{"part": "example", **row} for row in example()] == kept


def test_a_mix_run_again_gives_its_row() -> None:
    kept = next(row for row in read_rows(ROWS) if row.get("mix") == "paper/7")
    again = compare("paper/7", 8, device(), 1.0)
    assert again == pytest.approx({name: kept[name] for name in again}, abs=0.01)
