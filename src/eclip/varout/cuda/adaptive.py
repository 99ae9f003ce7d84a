"""A compaction stage whose mechanism and capacity follow the lengths that requests have.

The model chooses both from a sample. Every request's length comes back with its completion and is
only noted down; when lengths have drifted, another stage is chosen and built in the replanner's
thread, on a stream of its own, and takes over between two requests.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from typing import Any

import torch

from eclip.core.device import Closing
from eclip.core.lengths import Lengths
from eclip.cuda.conditional import neighbour
from eclip.cuda.driver import call, cu
from eclip.cuda.graphs import Executable
from eclip.files.machine import Machine
from eclip.varout import estimate
from eclip.varout.cuda.stage import DOUBLED, Compaction, built
from eclip.varout.estimate import Choice
from eclip.varout.mechanisms import Mechanism
from eclip.varout.watch import Replanner, Watch


class AdaptiveCompaction(Closing):
    """Serves one request at a time on the lane of ``stream``, which belongs to the caller."""

    def __init__(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        machine: Machine,
        lengths: Lengths,
        stream: Any,
        mechanisms: Iterable[Mechanism] = estimate.CHOICES,
        price_ns_per_byte: float = estimate.DEFAULT_PRICE,
        period_s: float = 1.0,
    ) -> None:
        self._x, self._y, self._stream = x, y, stream
        self._machine, self._price = machine, price_ns_per_byte
        self._mechanisms = tuple(mechanisms)
        self._context = call(cu.cuCtxGetCurrent)
        self._lock = threading.Lock()
        self.choice = self._decide(lengths)
        self.replanned: list[str] = []  # why, each time
        self._stage, self._executable, self._owner = self._build(self.choice)
        self.watch = Watch(lengths, self.choice.capacity)
        self._replanner = Replanner(self.watch, self._decide, self._adopt)
        self._replanner.start(period_s)

    def request(self) -> int:
        """Run one request and wait for it; its length."""
        with self._lock:
            call(cu.cuGraphLaunch, self._executable.handle, self._stream)
            call(cu.cuStreamSynchronize, self._stream)
            length = self._stage.count()
        self.watch.observe(length)
        return length

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._owner.close)
            stack.callback(self._replanner.close)

    def _decide(self, lengths: Lengths) -> Choice:
        return estimate.choose(
            self._machine, lengths, self._mechanisms, self._price, inputs=len(self._x)
        )

    def _build(self, choice: Choice) -> tuple[Compaction, Executable, contextlib.ExitStack]:
        mechanism = Mechanism(choice.mechanism)
        capacity = max(2 if mechanism in DOUBLED else 1, choice.capacity)
        stage = Compaction(self._x, self._y, mechanism, capacity)
        with contextlib.ExitStack() as owner:
            beside = owner.enter_context(neighbour(self._stream))
            executable = owner.enter_context(built(stage, beside))
            return stage, executable, owner.pop_all()

    def _adopt(self, choice: Choice, why: str) -> None:
        call(cu.cuCtxSetCurrent, self._context)  # this is the replanner's thread
        stage, executable, owner = self._build(choice)
        with self._lock:
            old, self._owner = self._owner, owner
            self._stage, self._executable, self.choice = stage, executable, choice
            self.replanned.append(why)
        old.close()
