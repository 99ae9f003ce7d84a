"""The pictures of the documents.

    PYTHONPATH=src python lab/pictures.py

``throughput.svg`` and ``efficiency.svg``: what every policy gave on the GPU over plain streams, mix
by mix, from docs/results.jsonl; its entry for that objective, where it has one of its own.
``services.svg``: p99 of services against background work, pair by pair, from docs/services.jsonl.
``ten-ms.svg``: ten milliseconds under plain streams, masks and joints, from docs/ten-ms.jsonl,
which ``--record`` makes anew on the simulator.
``account.svg``: credit, lateness and background of one run, from docs/account.jsonl, made likewise.
``plans.svg``: which slices the workers of the plans in docs/plans hold for how much of their time,
and their priorities; ``~66`` stands for kernels that were chosen for 66 SMs.
``report-light.png`` and ``report-dark.png``: the report of `eclip demo`, in a browser, if there is
one.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from lab.support.account_picture import draw_account, record_account
from lab.support.kept import read_rows
from lab.support.pages import started, take_picture
from lab.support.picture import Picture
from lab.support.services_picture import draw_services
from lab.support.ten_ms import draw_ten_ms, record

from eclip.core.plan import Plan
from eclip.files import store
from eclip.files.comparison import Comparison, Entry
from eclip.reports.results import geometric_mean

DOCS = Path(__file__).parents[1] / "docs"
COLOURS = {"mps": "#9aa5b1", "masks": "#5b8db8", "eclip": "#d9b26f", "search": "#c0392b"}
NAMES = {
    "mps": "MPS, best setting",
    "masks": "static masks, best",
    "eclip": "the paper's optimizer",
    "search": "search",
}
SHARES = "#1f4e79"
TEN_MS = DOCS / "ten-ms.jsonl"
ACCOUNT = DOCS / "account.jsonl"


def draw_gains(
    title: str, comparisons: Sequence[Comparison], objective: str, gain: Callable[[Entry], float]
) -> Picture:
    last = {
        one.mix: one
        for one in comparisons
        if not one.modelled and one.load_part is None and objective in one.objective.split(",")
    }
    picture = Picture(f"{title} over plain streams, measured on an H200, closed loop")
    left, top, scale, height = 210.0, 62.0, 1150.0, 14.0
    zero = left + scale * 0.12
    for index, (policy, colour) in enumerate(COLOURS.items()):
        picture.box(8 + 158 * index, 34, 12, 12, colour)
        picture.text(25 + 158 * index, 44, NAMES[policy])
    gains: dict[str, list[float]] = {policy: [] for policy in COLOURS}
    for row, (mix, one) in enumerate(sorted(last.items())):
        y = top + row * (len(COLOURS) * height + 10)
        for index, words in enumerate(textwrap.wrap(mix.replace(",", ", "), 30)):
            picture.text(8, y + 12 + 15 * index, words)
        plain = one.entry("shared")
        for index, (policy, colour) in enumerate(COLOURS.items()):
            entry = one.entry(f"{policy}-{objective}") or one.entry(policy)
            if plain is None or entry is None:
                continue
            gains[policy].append(gain(entry) / gain(plain))
            _bar(picture, zero, y + index * height, gains[policy][-1], scale, height, colour)
    y = top + len(last) * (len(COLOURS) * height + 10)
    picture.text(8, y + 12, "geometric mean", weight="bold")
    picture.text(8, y + 27, f"of {len(last)} mixes", weight="bold")
    for index, (policy, colour) in enumerate(COLOURS.items()):
        if gains[policy]:
            mean = geometric_mean(gains[policy])
            _bar(picture, zero, y + index * height, mean, scale, height, colour)
    picture.line(zero, top - 4, zero, y + len(COLOURS) * height + 4)
    return picture


def _bar(
    picture: Picture, zero: float, y: float, gain: float, scale: float, height: float, colour: str
) -> None:
    length = scale * (gain - 1)
    picture.box(min(zero, zero + length), y, abs(length), height - 1, colour)
    picture.text(max(zero, zero + length) + 4, y + height - 3, f"{gain - 1:+.1%}")


def draw_plans(plans: dict[str, Plan]) -> Picture:
    picture = Picture(
        "What search deployed: the sixteen slices of an H200, the darker the more of its time a "
        "worker holds one"
    )
    cell, y = 22.0, 34.0
    for plan in plans.values():
        switches = sum(part.switches for part in plan.main.assignments)
        picture.text(8, y + 8, f"{plan.mix.name}   ({switches} switches a request)", weight="bold")
        y += 14
        for part, planned in zip(plan.main.assignments, plan.workers, strict=True):
            held = np.zeros(len(plan.topology.slice_units))
            for group in part.groups:
                held[list(plan.lanes[group.lane].mask)] += group.predicted_ns
            held /= sum(group.predicted_ns for group in part.groups)
            priority = max(plan.lanes[group.lane].priority for group in part.groups)
            picture.text(20, y + 12, str(planned.model))
            for index, share in enumerate(held.tolist()):
                picture.box(130 + cell * index, y, cell, 16, SHARES, share)
            if priority:
                picture.text(140 + cell * len(held), y + 12, f"priority {priority}")
            y += 17
        y += 12
    return picture


def main() -> None:
    folder = DOCS / "pictures"
    if "--record" in sys.argv:
        record(TEN_MS)
        record_account(ACCOUNT)
    draw_all(folder)
    picture_report(folder)


def draw_all(folder: Path) -> None:
    """Those of stored data."""
    comparisons = store.load_results(DOCS / "results.jsonl").comparisons
    for name, title, objective, gain in (
        ("throughput", "Throughput (STP)", "throughput", lambda entry: entry.together.stp),
        (
            "efficiency",
            "Efficiency (STP·s/kJ)",
            "energy",
            lambda entry: entry.together.efficiency_per_kj,
        ),
    ):
        draw_gains(title, comparisons, objective, gain).save(folder / f"{name}.svg")
    plans = {
        file.stem: store.load(file, Plan)
        for file in sorted((DOCS / "plans").glob("*.json"))
        if not file.stem.endswith("-energy")
    }
    draw_plans(plans).save(folder / "plans.svg")
    draw_services(read_rows(DOCS / "services.jsonl")).save(folder / "services.svg")
    draw_ten_ms(read_rows(TEN_MS)).save(folder / "ten-ms.svg")
    draw_account(read_rows(ACCOUNT)).save(folder / "account.svg")


def picture_report(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as place, started() as browser:
        if browser is None:
            print("no Chromium is on the PATH, so the report's pictures stay as they are")
            return
        demo = [sys.executable, "-m", "eclip", "demo", "-o", place]
        subprocess.run(demo, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for scheme in ("light", "dark"):
            page = Path(place) / "report.html"
            take_picture(browser, page, folder / f"report-{scheme}.png", scheme=scheme)


if __name__ == "__main__":
    main()
