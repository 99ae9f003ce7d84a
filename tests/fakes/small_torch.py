"""As much of PyTorch's interface as lanes call, where PyTorch itself is not installed: streams that
stand for a handle, and a current stream for every thread."""

from __future__ import annotations

import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Stream:
    cuda_stream: int
    device: int
    lane: Any = None
    waited: list[int] = field(default_factory=list)

    def synchronize(self) -> None:
        self.waited.append(self.cuda_stream)


class Cuda:
    """``torch.cuda``."""

    def __init__(self, initialised: bool) -> None:
        self.initialised = initialised
        self.capturing = False
        self.waited: list[int] = []  # handles of the streams that were waited for
        self._thread = threading.local()

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def current_stream(self, device: int) -> Stream:
        return Stream(self.current(), device, waited=self.waited)

    def is_initialized(self) -> bool:
        return self.initialised

    def current_device(self) -> int:
        return int(getattr(self._thread, "device", 0))

    def set_device(self, device: int) -> None:
        self._thread.device = device

    def ExternalStream(self, handle: int, device: int) -> Stream:  # noqa: N802
        return Stream(handle, device)

    def current(self) -> int:
        """The handle of this thread's stream; 0 is the default stream."""
        return int(getattr(self._thread, "stream", 0))

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._thread.stream = self.current(), stream.cuda_stream
        try:
            yield
        finally:
            self._thread.stream = before


def small_torch(cuda: str | None = None, hip: str | None = None, initialised: bool = False) -> Any:
    module: Any = types.ModuleType("torch")
    module.__version__ = "2.13.0"
    module.version = types.SimpleNamespace(cuda=cuda, hip=hip)
    module.cuda = Cuda(initialised)
    return module
