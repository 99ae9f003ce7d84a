"""The recorder: a linear list of commands and barriers becomes a graph in one pass.

Only the open nodes are kept: the last barrier, and the nodes since. A command depends on the last
barrier. A barrier with one open node is that node; with several it is one empty node that joins
them; with none it changes nothing. There is no limit on open nodes.

``native/commands.h`` is its twin in libeclip; a test drives both with the same programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

N = TypeVar("N")


class Sink(Protocol[N]):
    """Makes the nodes; any error of it ends the recording."""

    def command(self, command: int, after: Sequence[N]) -> N: ...

    def join(self, after: Sequence[N]) -> N: ...


class Recorder(Generic[N]):
    def __init__(self, sink: Sink[N]) -> None:
        self._sink = sink
        self._barrier: list[N] = []  # none or one
        self._open: list[N] = []

    def command(self, command: int) -> N:
        node = self._sink.command(command, self._barrier)
        self._open.append(node)
        return node

    def barrier(self) -> None:
        if not self._open:
            return
        if len(self._open) > 1:
            self._open = [self._sink.join(self._open)]
        self._barrier, self._open = self._open, []
