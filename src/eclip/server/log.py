"""The server's log: one JSON object a line, or plain text where a person looks at a terminal."""

from __future__ import annotations

import datetime
import sys
from typing import Any, TextIO

import msgspec


class ServerLog:
    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._stream = stream or sys.stderr
        self._plain = self._stream.isatty()
        self._quiet = quiet

    def write(self, event: str, **fields: Any) -> None:
        """Something happened; the fields say to what, and why."""
        if self._quiet:
            return
        now = datetime.datetime.now(datetime.UTC)
        if self._plain:
            words = " ".join(f"{name}={value}" for name, value in fields.items())
            line = f"{now:%H:%M:%S} {event} {words}".rstrip()
        else:
            entry = {"time": now.isoformat(timespec="milliseconds"), "event": event, **fields}
            line = msgspec.json.encode(entry, enc_hook=str).decode()
        try:
            self._stream.write(f"{line}\n")
            self._stream.flush()
        except (OSError, ValueError):  # a full disk or a closed pipe is no reason to stop serving
            self._quiet = True
