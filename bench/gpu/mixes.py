"""The comparisons of docs/results.md on a GPU, one after the other in one process.

    PYTHONPATH=src:.gpu-deps python3 bench/gpu/mixes.py FOLDER MIX [MIX ...] [-- OPTIONS]

Each is `eclip compare MIX --device cuda OPTIONS`; modules are imported and models captured once for
all of them, since that is most of what happens before the first run. FOLDER gets the results file,
and a folder for each mix with what it printed, its plans, runs and observations. A comparison that
fails is named and the next one begins.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

from eclip.artefacts.profile import Profile
from eclip.cli import main as eclip
from eclip.cli import wiring

OPTIONS = (
    "--policies all --objective throughput,energy --verify 3 --refine 10 --repeats 3 --seconds 0.5 "
    "--search-seconds 4 --trials 9 --trial-seconds 0.25 --processes 15 --trace-ms 0"
)


class KeptSources(wiring.Sources):
    """Captures every worker's model only once, for all comparisons."""

    _kept: ClassVar[dict[tuple[int, str], Any]] = {}

    def __init__(self, profiles: Iterable[Profile], device: str, gpu: int = 0) -> None:
        super().__init__(profiles, device, gpu)
        if device == "cuda":
            self._made = self._kept


def compare(mix: str, folder: Path, options: Sequence[str]) -> int:
    mine = folder / mix.replace("/", "-").replace(":", "-").replace(",", "-")
    mine.mkdir(parents=True, exist_ok=True)
    sys.argv = ["eclip", "compare", mix, "--device", "cuda", *options]
    sys.argv += ["--results", str(folder / "results.jsonl"), "-o", str(mine)]
    with (mine / "printed.txt").open("w") as printed, contextlib.redirect_stdout(printed):
        try:
            eclip()
        except SystemExit as left:
            return int(left.code or 0)
        except Exception:
            traceback.print_exc()
            return 1
    return 0


def main() -> None:
    arguments = sys.argv[1:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    folder, *mixes = arguments[:cut]
    wiring.Sources = KeptSources  # type: ignore[misc]
    for mix in mixes:
        begin = time.monotonic()
        code = compare(mix, Path(folder), arguments[cut + 1 :] or shlex.split(OPTIONS))
        print(f"{mix}: exit code {code}, {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
