"""Claims of docs/results/programs.md about programs that share a GPU in processes of their own.

    PYTHONPATH=.:src:.gpu-deps python3 lab/gpu/programs.py FOLDER [--scenes a,b,c,d]
        [--ways time-sliced,eclip,eclip+MPS,...] [--minutes 9]

For every scene all programs of all ways start at once and wait. Way by way, services are measured
alone and beside the background, in turns and with the same arrivals. A way's results are in FOLDER
as soon as it is done, and it is not measured again; one begins only if it should end in time. So
the same command in the next call goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parents[2]))

from lab.support.kept import Row, add_rows, read_rows
from lab.support.mps import gpu_uuid
from lab.support.programs import (
    OURS,
    PLAIN,
    WAYS,
    Program,
    Times,
    Way,
    serve,
    start,
)
from lab.support.tables import print_table

from eclip.cuda.processes.mps import MpsDaemon
from eclip.files.excess import paired_ratios
from eclip.gpu.board_view import look

T = TypeVar("T")

APPS = Path(__file__).with_name("apps")
CLOSED, WARM_UP_S, ALONE_S = 40, 0.5, 1.0
TURNS = 4  # alone and shared, so that what drifts meets both
LOOK_S = 0.0005
LIMITS = {"eclip": 1.25, "eclip, MPS": 1.15}
LEAST_BACKGROUND = 0.90
RESULTS, LOSSES = "programs.jsonl", "losses"
START_S = 60.0  # of a scene, until all programs wait; and of the losses
SLOWER = 1.2  # than its arrivals, that a run is reckoned to be


@dataclass(frozen=True)
class Scene:
    services: tuple[tuple[str, ...], ...]  # programs and their arguments
    background: tuple[str, ...]
    load: float  # of every service, of what it serves alone back to back
    requests: int  # of the slowest service, for a claim; others get as many as fit into its time
    few: int  # for the other ways


EAGER, GRAPH = ("service.py", "eager", "resnet50"), ("service.py", "graph", "bert")
TRAINING = ("train.py", "vit_b_16", "32")
SCENES = {
    "a": Scene((EAGER,), TRAINING, 0.5, 4000, 800),
    "b": Scene((GRAPH,), ("infer.py", "vgg19", "32"), 0.35, 4000, 1000),
    "c": Scene((EAGER, GRAPH), TRAINING, 0.2, 2000, 400),
    "d": Scene((("generate.py",),), ("train.py", "resnet50", "32"), 0.7, 260, 60),
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


@dataclass(frozen=True)
class Reference:
    """Plain programs: the arrivals that follow from them, and what others are held against."""

    arrivals: list[list[Times]]  # of every service and turn, from 0
    alone: list[Times]  # latencies of every service, of all its arrivals
    steps_rps: float  # of the background

    def save(self, path: Path) -> None:
        arrays = {
            f"{service} {turn}": times
            for service, turns in enumerate(self.arrivals)
            for turn, times in enumerate(turns)
        }
        arrays |= {f"alone {service}": found for service, found in enumerate(self.alone)}
        np.savez(path, steps_rps=self.steps_rps, **arrays)  # type: ignore[arg-type]

    @staticmethod
    def load(path: Path, services: int) -> Reference:
        with np.load(path) as kept:
            arrivals = [[kept[f"{one} {turn}"] for turn in range(TURNS)] for one in range(services)]
            alone = [kept[f"alone {one}"] for one in range(services)]
            return Reference(arrivals, alone, float(kept["steps_rps"]))


def draw_arrivals(mean_ns: Sequence[float], requests: int) -> list[list[Times]]:
    """Poisson arrivals of services with these mean gaps, over the same time in every turn."""
    each = requests // TURNS
    counts = [round(each * max(mean_ns) / mean) for mean in mean_ns]
    return [
        [
            np.random.default_rng((turn, service))
            .exponential(mean, count)
            .cumsum()
            .astype(np.int64)
            for turn in range(TURNS)
        ]
        for service, (mean, count) in enumerate(zip(mean_ns, counts, strict=True))
    ]


class Measured:
    def __init__(self, name: str, scene: Scene, folder: Path) -> None:
        self.name, self.scene, self.folder = name, scene, folder
        self.kept = folder / f"scene-{name}.npz"
        self.reference: Reference | None = None
        if self.kept.is_file():
            self.reference = Reference.load(self.kept, len(scene.services))
        self.arrivals = self.reference.arrivals if self.reference else []

    def prepare(self, sets: Sequence[Set]) -> None:
        if not self.arrivals:
            (plain,) = (one for one in sets if one.way.name == PLAIN)
            means = [self._mean_ns(index, one) for index, one in enumerate(plain.services)]
            self.arrivals = draw_arrivals(means, self.scene.requests)

    def _mean_ns(self, index: int, program: Program) -> float:
        """Between two arrivals."""
        back_to_back = serve(program, np.zeros(CLOSED, dtype=np.int64), self.folder)["latency"]
        request_ns = float(back_to_back.max()) / CLOSED
        words = " ".join(self.scene.services[index])
        print(f"{self.name}: {words}, {request_ns / 1e6:.2f} ms back to back", flush=True)
        return request_ns / self.scene.load

    def expected_s(self, way: Way) -> float:
        """Of a way, by its arrivals."""
        alone, shared = (
            sum(float(turn[-1]) for turn in self._taken(part)[0]) / 1e9 for part in self._parts(way)
        )
        return SLOWER * (alone + shared) + TURNS * (ALONE_S + 2 * WARM_UP_S)

    def _parts(self, way: Way) -> tuple[float, float]:
        """Of the arrivals: alone, and shared."""
        few = self.scene.few / self.scene.requests
        if way.name == PLAIN:
            return 1.0, few
        return (1.0, 1.0) if way.name in OURS else (few, few)

    def _taken(self, part: float) -> list[list[Times]]:
        return [
            [turn[: max(1, round(part * len(turn)))] for turn in turns] for turns in self.arrivals
        ]

    def run(self, one: Set) -> list[Row]:
        """A row for every service."""
        of_alone, of_shared = (self._taken(part) for part in self._parts(one.way))
        alone: list[list[Row]] = []
        shared: list[list[Row]] = []
        busy = Busy()
        idle, beside = Steps(), Steps()
        for turn in range(TURNS):
            alone.append(self._serve(one, [turns[turn] for turns in of_alone], busy))
            self._background(one, idle, functools.partial(time.sleep, ALONE_S))
            due = [turns[turn] for turns in of_shared]
            both = functools.partial(self._serve, one, due, Busy())
            shared.append(self._background(one, beside, both))
        if one.way.name == PLAIN:
            services = range(len(self.arrivals))
            found = [_joined(alone, service, "latency") for service in services]
            self.reference = Reference(self.arrivals, found, idle.rps)
            self.reference.save(self.kept)
        return [
            self._row(one.way, index, alone, shared, busy, idle, beside)
            for index in range(len(one.services))
        ]

    def _row(
        self,
        way: Way,
        index: int,
        alone: Sequence[Sequence[Row]],
        shared: Sequence[Sequence[Row]],
        busy: Busy,
        idle: Steps,
        beside: Steps,
    ) -> Row:
        assert self.reference is not None
        counts = [len(turn[index]["latency"]) for turn in shared]
        ours = _joined(shared, index, "latency")
        base = _joined(alone, index, "latency", counts)
        cuts = np.cumsum([len(turn) for turn in self.arrivals[index]])[:-1]
        turns = [{"latency": turn} for turn in np.split(self.reference.alone[index], cuts)]
        plain = _joined([[turn] for turn in turns], 0, "latency", counts)
        row = {
            "scene": self.name,
            "way": way.name,
            "service": " ".join(self.scene.services[index]),
            "background": " ".join(self.scene.background),
            "requests": len(ours),
            "alone": _percentiles(base),
            "alone_time_sliced": _percentiles(plain),
            "latency": _percentiles(ours),
            "ratio": _ratio(ours, base),
            "ratio_time_sliced": _ratio(ours, plain),
            "busy_share": busy.share,
            "background_rps": beside.rps,
            "background_alone_rps": idle.rps,
            "background_alone_time_sliced_rps": self.reference.steps_rps,
        }
        if "tokens" in shared[0][index]:
            row["tokens_equal"] = all(
                bool((mine[index]["tokens"] == base[index]["tokens"][:count]).all())
                for mine, base, count in zip(shared, alone, counts, strict=True)
            )
            for key, turns_of in (("between", shared), ("between_alone", alone)):
                between = _joined(turns_of, index, "between")
                row[key] = _percentiles(between) | {"tokens": len(between)}
        return row

    def _serve(self, one: Set, due: Sequence[Times], busy: Busy) -> list[Row]:
        """All services at once, while somebody looks how much of the time one is busy."""
        found: list[Row] = [{} for _ in one.services]

        def ask(index: int) -> None:
            found[index] = serve(one.services[index], due[index], self.folder)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(found))]
        with busy.looking(one):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if not all(found):
            raise RuntimeError(f"{one.way.name}: a service did not answer")
        return found

    def _background(self, one: Set, steps: Steps, meanwhile: Callable[[], T]) -> T:
        """Count its steps while something else happens, and give what that gave."""
        self._steps(one, Steps(), functools.partial(time.sleep, WARM_UP_S))
        return self._steps(one, steps, meanwhile)

    def _steps(self, one: Set, steps: Steps, meanwhile: Callable[[], T]) -> T:
        one.background.order("run")
        one.background.answer()
        try:
            found = meanwhile()
        finally:
            one.background.order("halt")
        done = one.background.answer()
        steps.count += done["steps"]
        steps.seconds += done["seconds"]
        return found


@dataclass
class Steps:
    """Of background."""

    count: int = 0
    seconds: float = 0.0

    @property
    def rps(self) -> float:
        return self.count / self.seconds if self.seconds else 0.0


class Busy:
    """How much of a time a service on the board was busy; None where there is no board."""

    def __init__(self) -> None:
        self._looks = self._busy = 0

    @property
    def share(self) -> float | None:
        return self._busy / self._looks if self._looks else None

    @contextlib.contextmanager
    def looking(self, one: Set) -> Iterator[None]:
        if not one.way.eclip:
            yield
            return
        over = threading.Event()
        thread = threading.Thread(target=self._look, args=(one.board, over))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _look(self, board: Path, over: threading.Event) -> None:
        while not over.wait(LOOK_S):
            workers = look(board).workers
            self._looks += 1
            self._busy += any(one.tier == "service" and one.state == "busy" for one in workers)


def _joined(
    turns: Sequence[Sequence[Row]], index: int, key: str, counts: Sequence[int] | None = None
) -> Any:
    """Of all turns; of each only so many of the first."""
    most: Sequence[int | None] = counts or [None] * len(turns)
    return np.concatenate(
        [turn[index][key][:count] for turn, count in zip(turns, most, strict=True)]
    )


def _percentiles(latency: Any) -> dict[str, float]:
    values = np.percentile(latency, [50, 99, 100]) / 1e6
    return dict(zip(("p50_ms", "p99_ms", "max_ms"), map(float, values), strict=True))


def _ratio(ours: Any, base: Any) -> list[float]:
    (found,) = paired_ratios(np.asarray(ours, float), np.asarray(base, float), (0.99,))
    return [found.value, found.low, found.high]


@contextlib.contextmanager
def started(
    scene: Scene, name: str, folder: Path, ways: Sequence[Way], apps: Path
) -> Iterator[list[Set]]:
    """The programs of all ways, which wait."""
    with contextlib.ExitStack() as stack:
        needed = any(way.mps for way in ways)
        pipes = stack.enter_context(MpsDaemon(gpu_uuid())).pipes if needed else None
        sets = []
        for way in ways:
            board = folder / f"board-{name}-{way.name}".replace(", ", "-").replace(" ", "-")
            mine = [
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
            for program in mine:
                stack.callback(program.close)
            sets.append(Set(way, board, mine[:-1], mine[-1]))
        for one in sets:
            for program in one.all():
                program.wait()
        yield sets


def measure(
    scene: Scene,
    name: str,
    folder: Path,
    ways: Sequence[Way],
    apps: Path,
    until_s: float = float("inf"),
) -> Iterator[list[Row]]:
    """The rows of every way that is not measured yet and should end in time."""
    measured = Measured(name, scene, folder)
    # Plain programs first: all others are held against them.
    if measured.reference is None and all(way.name != PLAIN for way in ways):
        ways = [*(way for way in WAYS if way.name == PLAIN), *ways]
    with started(scene, name, folder, ways, apps) as sets:
        measured.prepare(sets)
        for one in sets:
            expected_s, left_s = measured.expected_s(one.way), until_s - time.monotonic()
            print(f"{name}, {one.way.name}: {expected_s:.0f} s expected", flush=True)
            if expected_s > left_s:
                print(f"{name}, {one.way.name}: left out, {left_s:.0f} s are left", flush=True)
                continue
            if measured.reference is None and one.way.name != PLAIN:
                continue
            yield measured.run(one)


def compare_losses(folder: Path) -> dict[str, Any]:
    """A training loop with and without libeclip: losses bit by bit."""
    app = [str(APPS / "train.py"), "resnet50", "16", "losses", "20"]
    found = []
    for way in (WAYS[0], next(way for way in WAYS if way.name == OURS[0])):
        program = start(
            app, way, "background", board=folder / "board-losses", pipes=None, folder=folder
        )
        try:
            found.append(program.answer()["losses"])
        finally:
            program.close()
    return {"scene": LOSSES, "steps": len(found[0]), "equal": found[0] == found[1]}


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
            parts = [f"{row['scene']}, {row['way']}: tokens {equal}"]
            for what, beside, alone in (
                ("to the first token", row["latency"], row["alone"]),
                (f"between {row['between']['tokens']:,}", row["between"], row["between_alone"]),
            ):
                ms = [one[key] for key in ("p50_ms", "p99_ms") for one in (beside, alone)]
                parts.append(
                    "{} p50 {:.2f} ms, alone {:.2f}, p99 {:.2f}, alone {:.2f}".format(what, *ms)
                )
            print("; ".join(parts))
        if row["scene"] == LOSSES:
            print(f"losses of {row['steps']} steps: {'equal' if row['equal'] else 'OTHER'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scenes", default="b,a,d,c,losses")
    parser.add_argument(
        "--ways", default=",".join(map(word_of, WAYS)), help="those to measure, in this order"
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="begin nothing that ends later")
    parser.add_argument("--most", type=int, default=1 << 20, help="requests, for a quick look")
    given = parser.parse_args()
    ways = {word_of(way): way for way in WAYS}
    scenes, wanted = given.scenes.split(","), given.ways.split(",")
    if unknown := {*scenes} - {*SCENES, LOSSES} | {*wanted} - {*ways}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    given.folder.mkdir(parents=True, exist_ok=True)
    run(
        given.folder,
        {name: at_most(SCENES[name], given.most) if name != LOSSES else None for name in scenes},
        [ways[word] for word in wanted],
        time.monotonic() + 60 * given.minutes,
    )
    print_rows(read_rows(given.folder / RESULTS))


def word_of(way: Way) -> str:
    """As it is written in a list of them."""
    return way.name.replace(", ", "+").replace(" ", "-")


def run(
    folder: Path,
    scenes: Mapping[str, Scene | None],
    ways: Sequence[Way],
    until_s: float,
    apps: Path = APPS,
) -> None:
    """Measure what is not there yet; whatever goes wrong in a scene, the next one may work."""
    for name, scene in scenes.items():
        done = {row.get("way") for row in read_rows(folder / RESULTS) if row["scene"] == name}
        left = [way for way in ways if way.name not in done]
        if not left or (scene is None and done):
            continue
        begin_s = time.monotonic()
        if begin_s + START_S > until_s:
            print(f"{name}: left out, {until_s - begin_s:.0f} s are left", flush=True)
            continue
        try:
            found = (
                measure(scene, name, folder, left, apps, until_s)
                if scene is not None
                else iter([[compare_losses(folder)]])
            )
            for rows in found:
                add_rows(folder / RESULTS, rows)
                for row in rows:
                    print(json.dumps(row), flush=True)
        except Exception:
            traceback.print_exc()
        print(f"{name}: {time.monotonic() - begin_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
