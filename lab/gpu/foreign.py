"""Claims of docs/results/programs.md about programs that nobody here wrote.

    PYTHONPATH=.:src:.gpu-deps python3 lab/gpu/foreign.py FOLDER [NAME ...] [--minutes 9]

Every program of lab/gpu/foreign calls another library and tells its outputs as a digest. It runs
plainly twice, then as background beside a service, then recorded and with a plan. Several programs
run at once. What a step found is in FOLDER as soon as it is done, and is not done again: so the
same command in the next call goes on. What has not ended after so many minutes is given up.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from lab.support.kept import Row, add_rows, read_rows
from lab.support.programs import ECLIP, WAYS, serve, start
from lab.support.tables import print_table

from eclip.errors import EclipError
from eclip.gpu.board import VARIABLE
from eclip.gpu.board_view import look

HERE = Path(__file__).parent
PROGRAMS = HERE / "foreign"
HELP = "telling"  # what they share
AT_ONCE = 6
LIMIT_S = 240.0
END_S = 10.0
APART_MS, BURST = 8.0, 500  # between requests of the service beside them, and requests at a time
LOOK_S = 0.02


class NothingLearntError(Exception):
    """About the program: the time was over, or the service beside it had ended."""


@dataclass(frozen=True)
class Runner:
    """Runs commands until a moment of time.monotonic()."""

    until_s: float = float("inf")

    def __call__(self, command: Sequence[str], variables: Mapping[str, str] | None = None) -> str:
        """What it prints; else an error with its last words."""
        left_s = self.until_s - time.monotonic()
        if left_s <= 0:
            raise NothingLearntError
        with subprocess.Popen(
            command,
            env=os.environ | dict(variables or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as child:
            try:
                said, errors = child.communicate(timeout=min(left_s, LIMIT_S))
            except subprocess.TimeoutExpired:
                _end(child)
                if left_s < LIMIT_S:
                    raise NothingLearntError from None
                raise RuntimeError(f"it took more than {LIMIT_S:g} s") from None
        if child.returncode != 0:
            words = (errors or said).strip().splitlines()
            raise RuntimeError(words[-1][:200] if words else f"exit code {child.returncode}")
        return said


def _end(child: subprocess.Popen[str]) -> None:
    """``eclip exec`` passes on what asks it to end; killed, it would leave its command behind."""
    child.terminate()
    try:
        child.communicate(timeout=END_S)
    except subprocess.TimeoutExpired:
        child.kill()


def digest_in(text: str) -> str:
    found = re.search(r'\{"digest": "(\w+)"\}', text)
    if found is None:
        raise RuntimeError("it told no digest")
    return found.group(1)


def counts_in(text: str) -> list[dict[str, int]]:
    """What ``eclip exec --json`` counted in every process, after what the command printed."""
    found = re.search(r'\{\s*"code".*', text, re.DOTALL)
    return list(json.loads(found.group(0))["processes"].values()) if found else []


def eclip(*words: str) -> list[str]:
    return [sys.executable, "-m", "eclip", *words]


class Beside:
    """A service with requests all the time, and what background on its board did."""

    def __init__(self, folder: Path) -> None:
        self.board, self._folder = folder / "board", folder
        self._yields: dict[tuple[str, int], int] = {}  # by program and process
        self._over = threading.Event()
        self.served = True

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        way = next(way for way in WAYS if way.name == ECLIP)
        app = [str(HERE / "apps" / "service.py"), "graph", "resnet50"]
        service = start(app, way, "service", board=self.board, pipes=None, folder=self._folder)
        threads = [threading.Thread(target=one) for one in (self._look, lambda: self._ask(service))]
        try:
            service.wait()
            for thread in threads:
                thread.start()
            yield
        finally:
            self._over.set()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            service.close()

    def yields(self, name: str) -> int:
        """Of the program's processes so far; on the board they have its file's name."""
        return sum(
            count for (seen, _), count in self._yields.copy().items() if Path(seen).stem == name
        )

    def _ask(self, service: Any) -> None:
        arrivals = (np.arange(BURST) * APART_MS * 1e6).astype(np.int64)
        try:
            while not self._over.is_set():
                serve(service, arrivals, self._folder)
        except (RuntimeError, OSError) as error:
            self.served = False
            print(f"the service beside them: {error}", flush=True)

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            with contextlib.suppress(EclipError):  # nobody has made it yet
                for worker in look(self.board).workers:
                    if worker.tier == "background":
                        self._yields[worker.name, worker.pid] = worker.yields


@dataclass
class Trial:
    """One program, step by step; a step that was done before is passed over."""

    name: str
    folder: Path
    run: Runner
    beside: Beside
    row: Row = field(default_factory=dict)

    def go_on(self) -> None:
        with contextlib.suppress(NothingLearntError):
            if not {"repeats", "plainly"} & self.row.keys():
                self._keep(self._plainly())
            if self.row.get("repeats") and "beside" not in self.row:
                self._keep(self._beside())
            if self.row.get("repeats") and "planned" not in self.row:
                self._keep(self._planned())

    def _keep(self, found: Row) -> None:
        self.row |= found
        add_rows(self.folder / "foreign.jsonl", [{"name": self.name, **found}])
        print(json.dumps({"name": self.name, **found}), flush=True)

    @property
    def _program(self) -> list[str]:
        return [sys.executable, str(PROGRAMS / f"{self.name}.py")]

    def _plainly(self) -> Row:
        """Whether it gives the same twice, which is all that can be asked of it."""
        try:
            first, second = (digest_in(self.run(self._program)) for _ in range(2))
        except RuntimeError as error:
            return {"plainly": str(error)}
        return {"digest": first, "repeats": first == second}

    def _beside(self) -> Row:
        command = eclip("exec", "--background", "--", *self._program)
        before = self.beside.yields(self.name)
        try:
            text = self.run(command, {VARIABLE: str(self.beside.board)})
            equal = digest_in(text) == self.row["digest"]
        except RuntimeError as error:
            return {"beside": str(error)}
        if not self.beside.served:
            raise NothingLearntError
        return {"beside": equal, "yields": self.beside.yields(self.name) - before}

    def _planned(self) -> Row:
        name = f"{self.name}:1"
        profiles, plan = str(self.folder / self.name), str(self.folder / f"{self.name}.json")
        record = eclip("record", "--as", name, "--sizes", "64,132", "-o", profiles, "--")
        planned = eclip("exec", "--plan", plan, "--profiles", profiles, "--json", "--")
        try:
            self.run([*record, *self._program])
            self.run(eclip("plan", name, "--policy", "eclip", "--profiles", profiles, "-o", plan))
            text = self.run([*planned, *self._program])
            counts = counts_in(text)
            equal = digest_in(text) == self.row["digest"]
        except RuntimeError as error:
            return {"planned": str(error)}
        launches = sum(one["launches"] for one in counts)
        share = sum(one["planned"] for one in counts) / max(launches, 1)
        return {"planned": equal, "planned_share": share}


def kept_rows(folder: Path) -> dict[str, Row]:
    """By program: what all steps found that were done."""
    found: dict[str, Row] = {}
    for row in read_rows(folder / "foreign.jsonl"):
        found.setdefault(row["name"], {}).update(row)
    return found


def words(value: Any) -> str:
    if isinstance(value, bool):
        return "equal" if value else "OTHER"
    return str(value or "")[:70]


def print_rows(rows: Sequence[Row]) -> None:
    lines = []
    for row in rows:
        share = row.get("planned_share")
        lines.append(
            [
                row["name"],
                words(row.get("plainly") or row.get("repeats")),
                words(row.get("beside")),
                str(row.get("yields", "")),
                words(row.get("planned")),
                "" if share is None else f"{share:.1%}",
            ]
        )
    columns = ["program", "twice", "beside a service", "yields", "with a plan", "planned"]
    print_table("Programs nobody here wrote", columns, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--minutes", type=float, default=9.0)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    run = Runner(time.monotonic() + 60 * given.minutes)
    known = sorted(path.stem for path in PROGRAMS.glob("*.py") if path.stem != HELP)
    done, beside = kept_rows(given.folder), Beside(given.folder)
    trials = [
        Trial(name, given.folder, run, beside, done.get(name, {})) for name in given.names or known
    ]
    with beside.serving(), ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(Trial.go_on, trials))
    print_rows(list(kept_rows(given.folder).values()))


if __name__ == "__main__":
    main()
