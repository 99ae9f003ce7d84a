"""Claims of docs/results/programs.md about programs that share a GPU in processes of their own.

    PYTHONPATH=.:src:.gpu-deps python3 bench/gpu/programs.py FOLDER [--scenes a,b,c,d]

For every scene all programs of all ways start at once, wait, and are measured in turns: services
alone and beside the background, with the same arrivals. Results are in FOLDER as soon as a scene is
done; a scene that is there is not measured again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.support.kept import add_rows, read_rows
from bench.support.mps import gpu_uuid
from bench.support.programs import (
    OURS,
    PLAIN,
    WAYS,
    Program,
    Times,
    Way,
    serve,
    start,
)
from bench.support.tables import print_table

from eclip.artefacts.excess import paired_ratios
from eclip.devices.cuda.mps import MpsDaemon
from eclip.devices.gpu.board_view import look

APPS = Path(__file__).with_name("apps")
CLOSED, WARM_UP_S, ALONE_S = 40, 0.5, 4.0
LOOK_S = 0.0005
LIMITS = {"eclip": 1.25, "eclip, MPS": 1.15}
LEAST_BACKGROUND = 0.90


@dataclass(frozen=True)
class Scene:
    services: tuple[tuple[str, ...], ...]  # programs and their arguments
    background: tuple[str, ...]
    load: float  # of every service, of what it serves alone back to back
    requests: int  # of each service, for a claim
    few: int  # for the other ways


EAGER, GRAPH = ("service.py", "eager", "resnet50"), ("service.py", "graph", "bert")
TRAINING = ("train.py", "vit_b_16", "32")
SCENES = {
    "a": Scene((EAGER,), TRAINING, 0.5, 4000, 800),
    "b": Scene((GRAPH,), ("infer.py", "vgg19", "32"), 0.35, 4000, 1000),
    "c": Scene((EAGER, GRAPH), TRAINING, 0.2, 1500, 500),
    "d": Scene((("generate.py",),), ("train.py", "resnet50", "32"), 0.5, 60, 30),
}


def at_most(scene: Scene, most: int) -> Scene:
    return replace(scene, requests=min(scene.requests, most), few=min(scene.few, most))


@dataclass
class Set:
    """The programs of one way."""

    way: Way
    board: Path
    services: list[Program]
    background: Program

    def all(self) -> list[Program]:
        return [*self.services, self.background]


class Measured:
    def __init__(self, name: str, scene: Scene, folder: Path, sets: Sequence[Set]) -> None:
        self.name, self.scene, self.folder, self.sets = name, scene, folder, sets
        (reference,) = (one for one in sets if one.way.name == PLAIN)
        self.arrivals = [self._arrivals(index, one) for index, one in enumerate(reference.services)]
        self.reference: list[Times] = []
        self.steps_rps = 0.0

    def _arrivals(self, index: int, program: Program) -> Times:
        back_to_back = serve(program, np.zeros(CLOSED, dtype=np.int64), self.folder)["latency"]
        mean_ns = back_to_back.max() / CLOSED / self.scene.load
        words = " ".join(self.scene.services[index])
        print(f"{self.name}: {words}, {mean_ns * self.scene.load / 1e6:.2f} ms back to back")
        gaps = np.random.default_rng(index).exponential(mean_ns, self.scene.requests)
        return gaps.cumsum().astype(np.int64)

    def run(self) -> list[dict[str, Any]]:
        ordered = sorted(self.sets, key=lambda one: one.way.name != PLAIN)
        return [row for one in ordered for row in self._of(one)]

    def _of(self, one: Set) -> list[dict[str, Any]]:
        claimed = one.way.name in (*OURS, PLAIN)
        count = self.scene.requests if claimed else self.scene.few
        alone, busy = self._serve(one, count)
        alone_rps = self._background(one, lambda: time.sleep(ALONE_S))
        if one.way.name == PLAIN:
            self.reference = [found["latency"] for found in alone]
            self.steps_rps = alone_rps
            count = self.scene.few
        shared: list[dict[str, Any]] = []
        rps = self._background(one, lambda: shared.extend(self._serve(one, count)[0]))
        rows = []
        for index, (mine, base) in enumerate(zip(shared, alone, strict=True)):
            ours = mine["latency"].astype(float)
            row = {
                "scene": self.name,
                "way": one.way.name,
                "service": " ".join(self.scene.services[index]),
                "background": " ".join(self.scene.background),
                "requests": len(ours),
                "alone": _percentiles(base["latency"][: len(ours)]),
                "alone_time_sliced": _percentiles(self.reference[index][: len(ours)]),
                "latency": _percentiles(ours),
                "ratio": _ratio(ours, base["latency"][: len(ours)]),
                "ratio_time_sliced": _ratio(ours, self.reference[index][: len(ours)]),
                "busy_share": busy,
                "background_rps": rps,
                "background_alone_rps": alone_rps,
                "background_alone_time_sliced_rps": self.steps_rps,
            }
            if "tokens" in mine:
                row["tokens_equal"] = bool((mine["tokens"] == base["tokens"][: len(ours)]).all())
                row["between"] = _percentiles(mine["between"])
                row["between_alone"] = _percentiles(base["between"])
            rows.append(row)
            print(json.dumps(row), flush=True)
        return rows

    def _serve(self, one: Set, count: int) -> tuple[list[dict[str, Any]], float | None]:
        """All services at once; and the part of the time in which one of them is busy."""
        found: list[dict[str, Any]] = [{} for _ in one.services]

        def ask(index: int) -> None:
            found[index] = serve(one.services[index], self.arrivals[index][:count], self.folder)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(found))]
        with Looking(one) as seen:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if not all(found):
            raise RuntimeError(f"{one.way.name}: a service did not answer")
        return found, seen.share

    def _background(self, one: Set, meanwhile: Any) -> float:
        """Steps a second while something else happens."""
        one.background.order("run")
        one.background.answer()
        time.sleep(WARM_UP_S)
        try:
            meanwhile()
        finally:
            one.background.order("halt")
        done = one.background.answer()
        return float(done["steps"] / done["seconds"])


class Looking:
    """How much of a time a service on the board was busy; None where there is no board."""

    def __init__(self, one: Set) -> None:
        self._board = one.board if one.way.eclip else None
        self._over = threading.Event()
        self._looks = self._busy = 0
        self._thread = threading.Thread(target=self._look)

    @property
    def share(self) -> float | None:
        return self._busy / self._looks if self._looks else None

    def __enter__(self) -> Looking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while self._board is not None and not self._over.wait(LOOK_S):
            workers = look(self._board).workers
            self._looks += 1
            self._busy += any(one.tier == "service" and one.state == "busy" for one in workers)


def _percentiles(latency: Any) -> dict[str, float]:
    values = np.percentile(latency, [50, 99, 100]) / 1e6
    return dict(zip(("p50_ms", "p99_ms", "max_ms"), map(float, values), strict=True))


def _ratio(ours: Any, base: Any) -> list[float]:
    (found,) = paired_ratios(np.asarray(ours, float), np.asarray(base, float), (0.99,))
    return [found.value, found.low, found.high]


def measure(
    scene: Scene, name: str, folder: Path, ways: Sequence[Way], apps: Path
) -> list[dict[str, Any]]:
    with contextlib.ExitStack() as stack:
        needed = any(way.mps for way in ways)
        pipes = stack.enter_context(MpsDaemon(gpu_uuid())).pipes if needed else None
        sets = []
        for way in ways:
            board = folder / f"board-{name}-{ways.index(way)}"
            started = [
                start(
                    [str(apps / app[0]), *app[1:]],
                    way,
                    tier,
                    board=board,
                    pipes=pipes,
                    folder=folder,
                )
                for tier, app in (
                    *(("service", app) for app in scene.services),
                    ("background", scene.background),
                )
            ]
            for program in started:
                stack.callback(program.close)
            sets.append(Set(way, board, started[:-1], started[-1]))
        for one in sets:
            for program in one.all():
                program.wait()
        return Measured(name, scene, folder, sets).run()


def compare_losses(folder: Path) -> dict[str, Any]:
    """A training loop with and without libeclip: losses bit by bit."""
    app = [str(APPS / "train.py"), "resnet50", "16", "losses", "20"]
    found = []
    for way in (WAYS[0], next(way for way in WAYS if way.name == OURS[0])):
        program = start(
            app, way, "background", board=folder / "board-losses", pipes=None, folder=folder
        )
        found.append(program.answer()["losses"])
        program.close()
    return {"scene": "losses", "steps": len(found[0]), "equal": found[0] == found[1]}


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    lines = []
    for row in rows:
        if "way" not in row:
            continue
        value, low, high = row["ratio"]
        busy = row["busy_share"]
        part = row["background_rps"] / row["background_alone_time_sliced_rps"]
        limit = LIMITS.get(row["way"])
        missed = ["p99"] if limit is not None and value > limit else []
        if limit is not None and busy is not None and part < LEAST_BACKGROUND * (1 - busy):
            missed.append("background")
        lines.append(
            [
                f"{row['scene']}: {row['service']}", row["way"], f"{row['requests']:,}",
                f"{row['latency']['p50_ms']:.2f}", f"{row['latency']['p99_ms']:.2f}",
                f"{value:.2f} ({low:.2f} to {high:.2f})", f"{row['ratio_time_sliced'][0]:.2f}",
                "" if busy is None else f"{busy:.2f}", f"{part:.3f}",
                "" if busy is None else f"{part / max(1 - busy, 1e-9):.2f}", ", ".join(missed),
            ]
        )  # fmt: skip
    columns = ["service", "way", "requests", "p50 ms", "p99 ms", "÷ alone (95%)"]
    columns += ["÷ alone, without", "busy", "background", "÷ (1 - busy)", "missed"]
    print_table("Two unmodified programs", columns, lines)
    for row in rows:
        if "tokens_equal" in row:
            equal = "equal" if row["tokens_equal"] else "OTHER"
            beside, alone = (row[key]["p99_ms"] for key in ("between", "between_alone"))
            print(
                f"{row['way']}: tokens {equal}; between tokens p99 {beside:.2f}, alone {alone:.2f}"
            )
        if row["scene"] == "losses":
            print(f"losses of {row['steps']} steps: {'equal' if row['equal'] else 'OTHER'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scenes", default="b,a,d,c,losses")
    parser.add_argument("--most", type=int, default=1 << 20, help="requests, for a quick look")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    results = given.folder / "programs.jsonl"
    rows = read_rows(results)
    for name in given.scenes.split(","):
        if any(row["scene"] == name for row in rows):
            continue
        begin = time.monotonic()
        try:
            if name == "losses":
                found = [compare_losses(given.folder)]
                print(json.dumps(found[0]), flush=True)
            else:
                scene = at_most(SCENES[name], given.most)
                found = measure(scene, name, given.folder, WAYS, APPS)
        except RuntimeError as error:
            print(f"{name}: {error}", flush=True)
            continue
        print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
        add_rows(results, found)
        rows += found
    print_rows(rows)


if __name__ == "__main__":
    main()
