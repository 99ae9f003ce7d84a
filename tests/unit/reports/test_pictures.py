"""The pictures of the documents are those that stored data gives, and points are the data's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lab.pictures import DOCS, draw_all
from lab.support.services_picture import WAYS, draw_services, points_of


def row(way: str, ratios: list[float]) -> dict[str, Any]:
    return {
        "device": "a GPU",
        "pair": "a+b",
        "load": 0.35,
        "shape": "poisson",
        "way": way,
        "background": 0.6,
        "background_over_rest": 0.9,
        "services": [{"requests": 10, "p99_ratio": {"value": value}} for value in ratios],
    }


def test_a_point_is_the_worst_service_of_its_row() -> None:
    (point,) = points_of([row("streams", [2.0, 7.0]), {"stage": "deaths"}])
    assert (point["p99_ratio"], point["over_rest"]) == (7.0, 0.9)


def test_every_way_is_drawn_and_the_worst_of_ours_is_named(tmp_path: Path) -> None:
    rows = [row(way, [2.0]) for way in WAYS] + [row("launches 16/8", [9.0])]
    file = tmp_path / "drawn.svg"
    draw_services(points_of(rows)).save(file)
    drawn = file.read_text()
    assert drawn.count("a+b at load 0.35") == len(WAYS)
    assert drawn.count("worst: 2.0×") == 2
    assert drawn.count(">a+b</text>") == 2


def test_a_point_beyond_the_axis_is_drawn_where_it_is(tmp_path: Path) -> None:
    rows = [row("streams", [2.0]) | {"background_over_rest": part} for part in (0.9, 1.6, 2.0)]
    file = tmp_path / "drawn.svg"
    draw_services(points_of(rows)).save(file)
    places = re.findall(r"translate\((\S+) .*<title>a\+b", file.read_text())
    assert len(set(places)) == 3


def test_the_pictures_are_those_of_the_stored_data(tmp_path: Path) -> None:
    draw_all(tmp_path)
    drawn = sorted(file.name for file in tmp_path.iterdir())
    assert drawn == ["efficiency.svg", "plans.svg", "services.svg", "throughput.svg"]
    for name in drawn:
        stored = (DOCS / "pictures" / name).read_text()
        assert (tmp_path / name).read_text() == stored, "draw it again: lab/pictures.py"
        assert "prefers-color-scheme: dark" in stored and "viewBox" in stored
