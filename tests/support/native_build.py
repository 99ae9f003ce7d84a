"""libeclip as built for tests, and the programs that run on the stand-in driver."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from waiting import PATIENCE_S


@dataclass(frozen=True)
class Native:
    folder: Path

    @property
    def library(self) -> Path:
        return self.folder / "plain" / "libeclip.so"

    @property
    def hip_library(self) -> Path:
        return self.folder / "plain" / "libeclip_hip.so"

    @property
    def standin(self) -> Path:
        """The stand-in driver, to be loaded into the process of a test."""
        return self.folder / "plain" / "libstandin.so"

    def run(
        self, program: str, *arguments: object, preload: bool | Path = False, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """A program of the build, on the stand-in beside it; ``preload``: libeclip, or another."""
        # A process that ThreadSanitizer watches would sleep for a second when it ends.
        environment = {**os.environ, "TSAN_OPTIONS": "atexit_sleep_ms=0", **variables}
        if preload:
            chosen = preload if isinstance(preload, Path) else self.library
            environment["LD_PRELOAD"] = str(chosen)
        return subprocess.run(
            [str(self.folder / program), *map(str, arguments)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
