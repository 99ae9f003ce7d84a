"""``eclip top``: services and background of all processes on a GPU, as they run."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group

from eclip.cli import screen
from eclip.cli.options import JsonOption
from eclip.cli.screen import interrupt
from eclip.errors import UsageError
from eclip.gpu.board_view import SeenBoard, SeenWorker, look_around

_LEAST_SECONDS = 0.1
_COLUMNS = (
    *("worker", "tier", "state", "SMs", "requests/s", "p99 ms", "bound ms", "slack ms"),
    *("late", "credit", "strict", "yields"),
    *("moves", "barriers", "longest pause ms", "requests", "stretches", "pid"),
)
_OPTIONAL = (
    *("pid", "stretches", "barriers", "requests", "moves", "longest pause ms"),
    *("strict", "credit", "late"),
)


def top(
    board: Annotated[
        Path | None,
        typer.Option(help="The board's file. Default: all boards of this user."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Update every N seconds.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print once and end.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the services and background that share a GPU now, from all processes on a board.

    Programs under `eclip exec --service`, `--background` or `--sms` are on a board, and all eclip
    commands with ECLIP_BOARD set. This command changes nothing for them. Ctrl-C ends this command.
    """
    if seconds < _LEAST_SECONDS:
        raise UsageError(f"--seconds must be at least {_LEAST_SECONDS:g}, not {seconds:g}")
    seen = look_around(board)
    if as_json:
        screen.print_json(seen)
    elif once or not screen.out.is_terminal:
        for one in seen:
            screen.out.print(_table(one))
    else:
        try:
            with screen.repainted() as paint:
                _watch(board, seconds, seen, paint)
        except KeyboardInterrupt as ended:  # Ctrl-C is the usual end; SIGTERM is not
            if interrupt.exit_code(ended) != 128 + signal.SIGINT:
                raise


def _watch(
    board: Path | None,
    seconds: float,
    seen: list[SeenBoard],
    paint: Callable[[Sequence[Group]], None],
) -> None:
    before: dict[str, SeenBoard] = {}
    while True:
        paint([_table(one, before.get(one.board)) for one in seen])
        before = {one.board: one for one in seen}
        time.sleep(seconds)
        seen = look_around(board)


def _table(seen: SeenBoard, before: SeenBoard | None = None) -> Group:
    """``before``: the earlier look, from which rates are computed."""
    rows = []
    for worker in seen.workers:
        rate = _rate(worker, seen, before)
        rows.append(
            [
                *(worker.name or "unnamed", worker.tier, worker.state, _units(worker)),
                *(_number(rate, 1), _number(worker.p99_ms, 2)),
                *(_number(worker.bound_ms, 2), _number(worker.slack_ms, 2), _late(worker)),
                *(_number(worker.credit, 2), worker.strict or "", str(worker.yields)),
                *(str(worker.moves), str(worker.barriers), _number(worker.longest_pause_ms, 1)),
                *(str(worker.requests), str(worker.stretches), str(worker.pid)),
            ]
        )
    count = len(seen.workers)
    title = f"{seen.board}: {count} worker{'' if count == 1 else 's'}"
    return screen.draw_table(title, _COLUMNS, rows, names=3, optional=_OPTIONAL)


def _rate(worker: SeenWorker, seen: SeenBoard, before: SeenBoard | None) -> float | None:
    """Requests per second since the earlier look; None: no such look, or a new worker."""
    if before is None:
        return None
    for earlier in before.workers:
        same = (earlier.name, earlier.pid) == (worker.name, worker.pid)
        if same and earlier.requests <= worker.requests:
            return (worker.requests - earlier.requests) * 1e9 / (seen.seen_ns - before.seen_ns)
    return None


def _late(worker: SeenWorker) -> str:
    """The part of a service's requests that was late."""
    if worker.late is None or not worker.counted:
        return ""
    return f"{worker.late / worker.counted:.2%}"


def _units(worker: SeenWorker) -> str:
    """Of a capped process: the SMs that it holds, and those that it is to have."""
    if not worker.units_wanted:
        return ""
    arrow = f" → {worker.units_wanted}" if worker.units_held != worker.units_wanted else ""
    return f"{worker.units_held}{arrow}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
