"""Claims of docs/results/programs.md about programs that nobody here wrote.

    PYTHONPATH=.:src:.gpu-deps python3 bench/gpu/foreign.py FOLDER [NAME ...]

Every program of bench/gpu/foreign calls another library and tells its outputs as a digest. It runs
plainly twice, then as background beside a service, then recorded and with a plan. Results are in
FOLDER as soon as a program is done; one that is there is not run again.
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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.support.kept import Row, add_rows, read_rows
from bench.support.programs import ECLIP, WAYS, serve, start
from bench.support.tables import print_table

from eclip.devices.gpu.board import VARIABLE
from eclip.devices.gpu.board_view import look
from eclip.errors import EclipError

HERE = Path(__file__).parent
PROGRAMS = HERE / "foreign"
HELP = "telling"  # what they share
AT_ONCE = 4
LIMIT_S = 240.0
APART_MS, BURST = 8.0, 500  # between requests of the service beside them, and requests at a time
LOOK_S = 0.02


def run(command: Sequence[str], variables: Mapping[str, str] | None = None) -> str:
    """What it prints; else an error with its last words."""
    try:
        done = subprocess.run(
            command,
            env=os.environ | dict(variables or {}),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"it took more than {LIMIT_S:g} s") from None
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip().splitlines()
        raise RuntimeError(words[-1][:200] if words else f"exit code {done.returncode}")
    return done.stdout


def digest_in(text: str) -> str:
    found = re.search(r'\{"digest": "(\w+)"\}', text)
    if found is None:
        raise RuntimeError("it told no digest")
    return found.group(1)


def eclip(*words: str) -> list[str]:
    return [sys.executable, "-m", "eclip", *words]


class Beside:
    """A service with requests all the time, and what background on its board did."""

    def __init__(self, folder: Path) -> None:
        self.board, self._folder = folder / "board", folder
        self._yields: dict[int, int] = {}  # by process
        self._over = threading.Event()

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

    def yields(self) -> int:
        """Of all background so far."""
        return sum(self._yields.values())

    def _ask(self, service: Any) -> None:
        arrivals = (np.arange(BURST) * APART_MS * 1e6).astype(np.int64)
        while not self._over.is_set():
            serve(service, arrivals, self._folder)

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            with contextlib.suppress(EclipError):  # nobody has made it yet
                for worker in look(self.board).workers:
                    if worker.tier == "background":
                        self._yields[worker.pid] = worker.yields


def try_plainly(name: str) -> Row:
    """Whether it gives the same twice, which is all that can be asked of it."""
    program = [sys.executable, str(PROGRAMS / f"{name}.py")]
    row: Row = {"name": name}
    try:
        first, second = (digest_in(run(program)) for _ in range(2))
        row |= {"digest": first, "repeats": first == second}
    except RuntimeError as error:
        row["plainly"] = str(error)
    return row


def try_beside(row: Row, beside: Beside) -> None:
    program = [sys.executable, str(PROGRAMS / f"{row['name']}.py")]
    before = beside.yields()
    try:
        text = run(eclip("exec", "--background", "--", *program), {VARIABLE: str(beside.board)})
        row |= {"beside": digest_in(text) == row["digest"], "yields": beside.yields() - before}
    except RuntimeError as error:
        row["beside"] = str(error)


def try_planned(row: Row, folder: Path) -> None:
    name = f"{row['name']}:1"
    mine, plan = folder / row["name"], folder / f"{row['name']}.json"
    program = [sys.executable, str(PROGRAMS / f"{row['name']}.py")]
    try:
        run(eclip("record", "--as", name, "--sizes", "64,132", "-o", str(mine), "--", *program))
        run(eclip("plan", name, "--policy", "eclip", "--profiles", str(mine), "-o", str(plan)))
        text = run(
            eclip("exec", "--plan", str(plan), "--profiles", str(mine), "--json", "--", *program)
        )
        found = re.search(r'\{\s*"code".*', text, re.DOTALL)
        counts = json.loads(found.group(0))["processes"] if found else []
        launches = sum(one["launches"] for one in counts)
        row["planned"] = digest_in(text) == row["digest"]
        row["planned_share"] = sum(one["planned"] for one in counts) / max(launches, 1)
    except RuntimeError as error:
        row["planned"] = str(error)


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
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    known = sorted(path.stem for path in PROGRAMS.glob("*.py") if path.stem != HELP)
    results = given.folder / "foreign.jsonl"
    done = read_rows(results)
    wanted = [name for name in given.names or known if all(row["name"] != name for row in done)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        rows = list(pool.map(try_plainly, wanted))
    runs = [row for row in rows if row.get("repeats")]
    beside = Beside(given.folder)
    with beside.serving():
        for row in runs:  # one at a time: their yields are told apart by that
            try_beside(row, beside)
            print(json.dumps(row), flush=True)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda row: try_planned(row, given.folder), runs))
    add_rows(results, rows)
    print_rows([*done, *rows])


if __name__ == "__main__":
    main()
