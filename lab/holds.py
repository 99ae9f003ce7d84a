"""What background leaves idle while it gives way: modelled, on a driver with a clock of its own.

    python lab/holds.py [--library FILE] [--host-us N] [--linger-us N] [--seconds N]

Kernels take what they took on an H200 alone (src/eclip/data/profiles). A launch takes the host so
many microseconds, and what a thread needs for other calls is assumed (native/testing/clocked.cpp).
Nothing is measured: the table shows what libeclip's rules cost, and does so on any machine. With
--library it shows those of another build.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from lab.support.tables import print_table

from eclip.core.profile import Profile
from eclip.files import store
from eclip.gpu.board import open_board

ROOT = Path(__file__).parents[1]
NATIVE = ROOT / "native"
PROFILES = ROOT / "src" / "eclip" / "data" / "profiles" / "h200"
MODELS = ("vgg19-32", "vgg19-8", "resnet50-32", "densenet121-32", "vit_b_16-8", "bert-32")
# Busy a third of the time, as the service of docs/results/programs.md.
SERVICE = ("--rate", "400", "--request-ns", "1200000")
WAYS = {"no service": (), "time-sliced": SERVICE, "beside": (*SERVICE, "--beside", "1")}


def kernels_ns(model: str) -> list[str]:
    profile = store.load(PROFILES / f"{model}.json.gz", Profile)
    return [str(round(by_size[-1])) for by_size in profile.busy_ns]


def measure(library: Path, words: tuple[str, ...]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, open_board(Path(folder) / "board"):
        done = subprocess.run(
            [NATIVE / "build" / "clocked" / "idle", *words],
            env={
                **os.environ,
                "LD_PRELOAD": str(library.resolve()),
                "ECLIP_TIER": "background",
                "ECLIP_BOARD": str(Path(folder) / "board"),
            },
            capture_output=True,
            text=True,
            check=True,
        )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--library",
        type=Path,
        default=NATIVE / "build" / "plain" / "libeclip.so",
        help="the libeclip.so to run (default: the one that tests use)",
    )
    parser.add_argument("--host-us", type=float, default=5.0, help="of the host for a launch")
    parser.add_argument(
        "--linger-us", type=float, default=106.0, help="that a service is busy after a request"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="modelled, of each row")
    given = parser.parse_args()
    if not given.library.is_file():
        parser.error(f"there is no {given.library}: make native-tests")
    common = ("--seconds", str(given.seconds), "--host-ns", str(round(1000 * given.host_us)))
    linger = ("--linger-ns", str(round(1000 * given.linger_us)))
    lines = []
    for model in MODELS:
        for way, words in WAYS.items():
            row = measure(given.library, (*common, *linger, *words, *kernels_ns(model)))
            shown = (row["busy"], row["worked"], row["worked"] / (1 - row["busy"]))
            means = (row["stretch_us"], row["queued_us"], row["resumed_us"])
            lines.append([model, way, *(f"{n:.3f}" for n in shown), *(f"{n:.0f}" for n in means)])
    columns = ["background", "service", "busy", "worked", "÷ (1 - busy)", "stretch µs"]
    print_table("Modelled", [*columns, "found queued µs", "resumed after µs"], lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
