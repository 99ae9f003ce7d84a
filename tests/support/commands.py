"""``eclip`` run in the test's own process or in another, and what every refusal must look like."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from eclip.cli import main
from waiting import until

# Runs the command line, and makes a file when a function is called for the n-th time. What a shell
# starts in the background ignores interrupts, and so would its children.
_MARKING = """
import importlib, signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
place, mark, left = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
module, _, names = place.partition(":")
*outer, name = names.split(".")
owner = importlib.import_module(module)
for part in outer:
    owner = getattr(owner, part)
real = getattr(owner, name)
def marking(*arguments, **options):
    global left
    left -= 1
    if left == 0:
        mark.touch()
    return real(*arguments, **options)
setattr(owner, name, marking)
sys.argv = ["eclip", *sys.argv[4:]]
from eclip.cli import main
main()
"""


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


class Cli:
    """Runs ``eclip`` in this process, in a folder of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch = monkeypatch
        self.capsys = capsys

    def __call__(self, *arguments: object) -> Outcome:
        self.monkeypatch.setattr(sys, "argv", ["eclip", *map(str, arguments)])
        self.capsys.readouterr()
        for stream in (sys.stdout, sys.stderr):  # as __main__ does: names may be no UTF-8
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        with pytest.raises(SystemExit) as stop:
            main()
        captured = self.capsys.readouterr()
        assert stop.value.code is None or isinstance(stop.value.code, int)
        return Outcome(stop.value.code or 0, captured.out, captured.err)


@contextlib.contextmanager
def started(
    *arguments: object, folder: Path, mark: Path, place: str, times: int = 1
) -> Iterator[subprocess.Popen[str]]:
    """``eclip`` in a process of its own that has come to the n-th call of ``place``.

    ``place`` is module:function or module:Class.method; ``mark`` a file that does not exist yet.
    """
    with subprocess.Popen(
        [sys.executable, "-c", _MARKING, place, str(mark), str(times), *map(str, arguments)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert until(lambda: mark.exists() or process.poll() is not None)
            assert process.poll() is None, process.communicate()
            yield process
        finally:
            process.kill()  # nothing if it has ended, as it should have


def assert_refused(outcome: Outcome, *words: str, code: int = 2) -> None:
    """One line for a person that names the fault, the right exit code, nothing on stdout."""
    assert outcome.code == code
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    lines = [line for line in outcome.err.splitlines() if line.strip()]
    assert len(lines) == 1
    assert lines[0].startswith("eclip: ")
    for word in words:
        assert word in lines[0]
