"""The pictures of the documents are those that stored data gives, and points are the data's."""

from __future__ import annotations

import re
from pathlib import Path

from lab.pictures import DOCS, draw_all
from lab.support.services_picture import WAYS, Point, draw_services


def point(way: str, ratio: float, over_rest: float = 0.9) -> Point:
    return {
        "pair": "a+b",
        "load": 0.35,
        "shape": "poisson",
        "way": way,
        "background": 0.6,
        "over_rest": over_rest,
        "p99_ratio": ratio,
    }


def test_every_way_is_drawn_and_the_worst_of_ours_is_named(tmp_path: Path) -> None:
    points = [*(point(way, 2.0) for way in WAYS), point("launches 16/8", 9.0)]
    file = tmp_path / "drawn.svg"
    draw_services(points).save(file)
    drawn = file.read_text()
    assert drawn.count("a+b at load 0.35") == len(WAYS)
    assert drawn.count("worst: 2.0×") == 2
    assert drawn.count(">a+b</text>") == 2


def test_a_point_beyond_the_axis_is_drawn_where_it_is(tmp_path: Path) -> None:
    points = [point("streams", 2.0, part) for part in (0.9, 1.6, 2.0)]
    file = tmp_path / "drawn.svg"
    draw_services(points).save(file)
    places = re.findall(r"translate\((\S+) .*<title>a\+b", file.read_text())
    assert len(set(places)) == 3


def test_the_pictures_are_those_of_the_stored_data(tmp_path: Path) -> None:
    draw_all(tmp_path)
    drawn = sorted(file.name for file in tmp_path.iterdir())
    assert drawn == [
        "account.svg",
        "efficiency.svg",
        "plans.svg",
        "services.svg",
        "ten-ms.svg",
        "throughput.svg",
    ]
    for name in drawn:
        stored = (DOCS / "pictures" / name).read_text()
        assert (tmp_path / name).read_text() == stored, "draw it again: lab/pictures.py"
        assert "prefers-color-scheme: dark" in stored and "viewBox" in stored
