"""The server's log: one JSON object a line, or plain text where a person looks at a terminal.

Writing never waits. A line goes out if the stream takes it at once; else it is lost, and the next
line that goes out is preceded by the number of lost ones. Processes of the server write to a pipe
that the supervisor reads (``children.py``): what they log arrives as fields, and what a library
prints as text.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import logging
import os
import secrets
import select
import sys
import traceback
from typing import Any, TextIO

import msgspec

_MOST_BYTES = 4096  # of a line: a pipe that says it can be written takes so many without waiting
_LEAST_FIELD = 16  # characters that are left of a field
_FIELDS = "eclip"  # the attribute of a logging record with fields of ours


class ServerLog:
    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._stream = stream or sys.stderr
        self._plain = self._stream.isatty()
        self._quiet = quiet
        self._lost = 0

    def write(self, event: str, **fields: Any) -> None:
        """Something happened; the fields say to what, and why."""
        if not self._quiet:
            self._put(event, fields)

    def relay(self, who: str, line: bytes) -> None:
        """A line that a process of the server wrote. Text is written also where the log is quiet:
        a library may say there why a process died."""
        fields = _fields_of(line)
        if fields is not None:
            if not self._quiet:
                self._put(str(fields.pop("event")), {"process": who, **fields})
        elif text := line.decode(errors="replace").rstrip():
            self._put(f"{who} says", {"line": text})

    def _put(self, event: str, fields: dict[str, Any]) -> None:
        if self._lost:
            if not self._give(
                self._line("log lines were lost: nobody read them", {"lost": self._lost})
            ):
                self._lost += 1
                return
            self._lost = 0
        if not self._give(self._line(event, fields)):
            self._lost += 1

    def _line(self, event: str, fields: dict[str, Any]) -> bytes:
        if not self._plain:
            return _json_line(event, fields)
        now = datetime.datetime.now(datetime.UTC)
        words = " ".join(f"{name}={value}" for name, value in fields.items())
        return f"{now:%H:%M:%S} {event} {words}".rstrip().encode(errors="replace") + b"\n"

    def _give(self, line: bytes) -> bool:
        """Whether the stream took it, at once."""
        try:
            descriptor = self._stream.fileno()
        except (io.UnsupportedOperation, AttributeError):
            self._stream.write(line.decode())
            return True
        except ValueError:  # a closed stream is no reason to stop serving
            return False
        try:
            poll = select.poll()  # select() takes no descriptor above 1023
            poll.register(descriptor, select.POLLOUT)
            # A pipe that nobody has open for reading is an error, not a wait.
            return bool(poll.poll(0)) and os.write(descriptor, line) == len(line)
        except OSError:  # nor is a full disk or a closed pipe
            return False


class _ToSupervisor(logging.Handler):
    """Writes each record as an object on one line, its exception as a field. What the pipe does
    not take is lost."""

    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = {"logger": record.name, **getattr(record, _FIELDS, {})}
        if record.exc_info is not None and record.exc_info[1] is not None:
            fields["error"] = "".join(traceback.format_exception(record.exc_info[1]))
        with contextlib.suppress(OSError):
            os.write(sys.stderr.fileno(), _json_line(record.getMessage(), fields))


def log_to_server() -> None:
    """In a process of the server: what is logged goes to the supervisor, as objects."""
    logging.basicConfig(level=logging.WARNING, handlers=[_ToSupervisor()], force=True)
    logging.getLogger("eclip").setLevel(logging.INFO)


def note(event: str, **fields: Any) -> None:
    """A line of the log, from any process of the server."""
    logging.getLogger("eclip.server").info(event, extra={_FIELDS: fields})


def report(event: str, error: BaseException, **fields: Any) -> str:
    """Log an exception under a number. The answer has its type and this number, for its text may
    hold what no client should read."""
    number = secrets.token_hex(4)
    logging.getLogger("eclip.server").error(
        event, exc_info=error, extra={_FIELDS: {"fault": number, **fields}}
    )
    return f"{type(error).__name__}, fault {number} in the server's log"


def _fields_of(line: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(msgspec.DecodeError):
        found = msgspec.json.decode(line)
        if isinstance(found, dict) and "event" in found:
            found.pop("time", None)
            return found
    return None


def _json_line(event: str, fields: dict[str, Any]) -> bytes:
    """A line of at most ``_MOST_BYTES``; long fields lose their middle."""
    now = datetime.datetime.now(datetime.UTC)
    entry = {"time": now.isoformat(timespec="milliseconds"), "event": event, **fields}
    most = _MOST_BYTES
    while True:
        line = msgspec.json.encode(entry, enc_hook=str) + b"\n"
        if len(line) <= _MOST_BYTES:
            return line
        most //= 2
        if most < _LEAST_FIELD:  # it has too many fields
            fields = {}
        shown = {"event": event, **fields}
        entry = {"time": entry["time"]} | {
            name: _shortened(value, most) for name, value in shown.items()
        }


def _shortened(value: Any, most: int) -> Any:
    text = value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()
    return value if len(text) <= most else f"{text[: most // 3]} … {text[-most // 2 :]}"
