"""A progress that keeps what it was told, and may ask for a stop by itself."""

from __future__ import annotations

from eclip.progress import Progress


class Heard(Progress):
    """Asks for a stop once this share of a phase is done; ``stop_in``: of the one so named only."""

    def __init__(self, stop_at: float = 2.0, stop_in: str | None = None) -> None:
        super().__init__()
        self.phases: list[str] = []
        self.parts: list[float] = []
        self.warnings: list[str] = []
        self._stop_at = stop_at
        self._stop_in = stop_in

    def phase(self, name: str) -> None:
        self.phases.append(name)

    def part(self, share: float) -> None:
        self.parts.append(share)
        here = self._stop_in is None or self.phases[-1:] == [self._stop_in]
        if here and share >= self._stop_at:
            self.stop()

    def warn(self, message: str) -> None:
        self.warnings.append(message)
