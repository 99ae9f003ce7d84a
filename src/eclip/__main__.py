"""The entry point of ``eclip`` and ``python -m eclip``.

Importing the commands takes up to a second, so they are imported last. This module first handles
signals, and standard streams that are closed or cannot write every character. It imports the
standard library only.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import signal
import sys
from types import FrameType

# What a screen without these characters shows instead. A higher bar becomes a denser sign.
_PLAIN = str.maketrans(
    {
        **dict(zip("▁▂▃▄▅▆▇█", "_-~=+*%#", strict=True)),
        "·": ".",
        "◆": "@",
        "┤": "|",
        "│": "|",
        "└": "+",
        "─": "-",
        "━": "-",
        "╸": "-",
        "→": ">",
        "×": "x",
        "µ": "u",
        "α": "a",
        "σ": "s",
        "…": "...",
        "≤": "<=",
    }
)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _end_at_once)
    _mend_streams()
    from eclip.cli import main as run_command

    run_command()


def _end_at_once(number: int, frame: FrameType | None) -> None:
    word = "interrupted" if number == signal.SIGINT else "terminated"
    _say(f"eclip: {word} before anything began\n")
    os._exit(128 + number)


def _mend_streams() -> None:
    """Refuse a closed standard output; replace characters that a stream's encoding does not have.

    In the locale C a screen has ASCII only, though Python would write UTF-8.
    """
    nowhere = sys.stdout is None
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: the next file opened would get this descriptor
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if nowhere:
        _say("eclip: standard output is closed; leave it open, or send it to a file\n")
        os._exit(2)
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(io.FileIO(0), encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w"), encoding="utf-8", line_buffering=True)
    codecs.register_error("eclip-plain", _in_plain_signs)
    locale = os.environ.get("LC_ALL") or os.environ.get("LC_CTYPE") or os.environ.get("LANG")
    encoding = "ascii" if locale in ("C", "POSIX") else None
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding=encoding or stream.encoding, errors="eclip-plain")


def _in_plain_signs(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    plain = error.object[error.start : error.end].translate(_PLAIN)
    return plain.encode("ascii", "replace").decode(), error.end


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, line.encode())


if __name__ == "__main__":
    main()
