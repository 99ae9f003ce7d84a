"""Output of commands: tables and text to standard output, all else to standard error.

While a progress bar is open, the first SIGINT or SIGTERM asks the work to end early and to return
its results so far; the second ends the command at once.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import select
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import msgspec
import rich.progress
import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from eclip.cli.screen import interrupt
from eclip.cli.screen.tables import fold_header, lay_out
from eclip.core.model_key import ModelKey
from eclip.files.encoding import encode_json
from eclip.progress import Progress

_ESCAPED = re.compile(r"[^\x00-\x7f]+")  # in JSON, where the stream is not UTF-8
_PIPE_WIDTH = 160  # a table cut at 80 columns is of no use in a file


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """The output pipe is closed, as in ``| head -1``: the command goes on silently."""
        _silence()


# No markup: names and messages may hold square brackets. COLUMNS counts in a pipe, too.
out = _Console(
    width=shutil.get_terminal_size((_PIPE_WIDTH, 0)).columns, highlight=False, markup=False
)
err = _Console(stderr=True, highlight=False, markup=False)


def write(text: str) -> None:
    """Write ``text`` unchanged to standard output."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _silence()


def nobody_reads() -> bool:
    """True if standard output is a pipe whose other end is closed."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError):
        return False


def end_output() -> None:
    """Flush now, so that a failed write does not raise when the interpreter ends."""
    try:
        sys.stdout.flush()
    except OSError:
        _silence()


def _silence() -> None:
    """Send standard output to /dev/null from now on."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        sys.stdout.flush()


def print_json(value: Any) -> None:
    """One JSON document on standard output, and nothing else; a model is its text, ``bert:8``."""
    data = msgspec.json.format(encode_json(_readable(value)), indent=2) + b"\n"
    if sys.stdout.encoding.lower().replace("-", "") != "utf8":
        data = _ESCAPED.sub(lambda found: json.dumps(found[0])[1:-1], data.decode()).encode()
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    except BrokenPipeError:
        _silence()


def _readable(value: Any) -> Any:
    """Plain data with every model key as its text."""
    if isinstance(value, ModelKey):
        return str(value)
    if isinstance(value, msgspec.Struct):
        data: dict[str, Any] = msgspec.to_builtins(value)
        members = {field.encode_name: field.name for field in msgspec.structs.fields(value)}
        return {
            name: _readable(getattr(value, members[name])) if name in members else plain
            for name, plain in data.items()
        }
    if isinstance(value, dict):
        return {key: _readable(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(part) for part in value]
    return value


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    names: int = 1,
    optional: Sequence[str] = (),
) -> None:
    """The first columns hold names, to the left; the others numbers, to the right.

    ``optional`` are the columns to leave out first where the screen is too narrow.
    """
    out.print(draw_table(title, columns, rows, names, optional))


def draw_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    names: int = 1,
    optional: Sequence[str] = (),
) -> Group:
    """The table that ``print_table`` prints."""
    cells = [list(row) for row in rows]
    layout = lay_out(columns, cells, names, out.width, optional)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, width in zip(layout.shown, layout.widths, strict=True):
        name = index < names
        table.add_column(
            fold_header(columns[index], width),
            justify="left" if name else "right",
            overflow="ellipsis" if name else "fold",
            width=width,
        )
    for row in cells:
        table.add_row(*(row[index] for index in layout.shown))
    parts: list[RenderableType] = [Text(title, style="italic"), table]
    if layout.left_out:
        narrow = f"(too narrow for: {', '.join(layout.left_out)}; set COLUMNS to see them)"
        parts.append(Text(narrow))
    return Group(*parts)


@contextlib.contextmanager
def repainted() -> Iterator[Callable[[Sequence[Group]], None]]:
    """A part of the screen that is painted anew by every call, and stays when the block ends."""
    with Live(console=out, auto_refresh=False) as live:
        yield lambda tables: live.update(Group(*tables), refresh=True)


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Name and value, a line each; long values wrap under themselves."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, value)
    out.print(table)


def tell(message: str) -> None:
    """Print a line about the work on standard error."""
    with contextlib.suppress(OSError):
        err.print(f"eclip: {message}", soft_wrap=True)


def warn(message: str) -> None:
    with contextlib.suppress(OSError):
        err.print(f"warning: {message}", style="yellow", soft_wrap=True)


class ProgressBar(Progress):
    """A bar on standard error: the phase, the time since the work began, the time left."""

    def __init__(self, what: str, bar: rich.progress.Progress, in_lines: bool = False) -> None:
        super().__init__()
        self._in_lines = in_lines
        self.signal: int | None = None  # that asked for a stop
        self._what = what
        self._bar = bar
        self._task = bar.add_task(what, total=1.0)

    def phase(self, name: str) -> None:
        self._bar.reset(self._task, total=1.0, description=f"{self._what}: {name}")
        if self._in_lines:
            interrupt.say(f"{self._what}: {name}")

    def part(self, share: float) -> None:
        self._bar.update(self._task, completed=share)

    def warn(self, message: str) -> None:
        warn(message)

    def part_or_end(self, share: float) -> None:
        """Like ``part``, for work without partial results: a stop request raises here."""
        self.part(share)
        if self.stopped:
            raise interrupt.Interrupt(self.signal or signal.SIGINT)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise interrupt.Interrupt(number)
        self.signal = number
        self.stop()
        interrupt.say("stopping: finished runs are kept; press Ctrl-C again to stop at once")


class _Elapsed(rich.progress.ProgressColumn):
    """Since the bar was opened, over all phases."""

    def __init__(self, bar_began: float, clock: Callable[[], float]) -> None:
        super().__init__()
        self._began, self._clock = bar_began, clock

    def render(self, task: rich.progress.Task) -> Text:
        elapsed = datetime.timedelta(seconds=int(self._clock() - self._began))
        return Text(str(elapsed), style="progress.elapsed")


@contextmanager
def progress_bar(what: str, *, in_lines: bool = False) -> Iterator[ProgressBar]:
    """A bar that vanishes when the work ends. ``in_lines``: where there is no terminal, a line for
    every phase, for work that takes minutes.
    """
    clock = err.get_time
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        _Elapsed(clock(), clock),
        rich.progress.TimeRemainingColumn(compact=True),
        rich.progress.TextColumn("left"),
    )
    shown = err.is_terminal  # elsewhere it would leave an empty line
    with rich.progress.Progress(*columns, console=err, transient=True, disable=not shown) as bar:
        progress = ProgressBar(what, bar, in_lines and not shown)
        with interrupt.handled_by(progress.on_signal, clock):
            yield progress


def exit_if_stopped(progress: Progress, what_was_kept: str) -> None:
    """End a command after a stop request, when its results so far are saved and printed.

    ``what_was_kept``: the end of the printed line, with the files that hold the results.
    """
    if not progress.stopped:
        return
    number = (progress.signal if isinstance(progress, ProgressBar) else None) or signal.SIGINT
    with contextlib.suppress(OSError):
        sys.stderr.write(f"eclip: stopped early; {what_was_kept}\n")
    raise typer.Exit(128 + number)


def exit_if_missed(missed: Sequence[str], strict: bool) -> None:
    """Print the missed promises; a strict command ends with 3."""
    for words in missed:
        warn(words)
    if missed and strict:
        raise typer.Exit(3)


def modelled_note(modelled: bool) -> str:
    return " (modelled: time and energy are a simulator's)" if modelled else ""


def runs_title(runs: int) -> str:
    """``STP, 1 run`` or ``STP of 3 runs``."""
    return "STP, 1 run" if runs == 1 else f"STP of {runs} runs"


def worker_label(name: str, model: ModelKey) -> str:
    """A worker's name with the units that its kernels are chosen for: ``gpt2~66`` of ``gpt2``,
    whose model is ``gpt2~66:8``; ``gpt2~66.1`` where there are several.
    """
    return f"{model.title}{name.removeprefix(model.name)}" if model.kernels_for else name


def number(value: float | None, digits: int) -> str:
    return "none" if value is None else f"{value:.{digits}f}"
