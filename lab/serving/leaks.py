"""Whether a server leaks: what each of its processes holds, before, during and after many requests.

    PYTHONPATH=src python lab/serving/leaks.py [--requests N] [--seconds S]

A server (`eclip serve`, two fronts, simulated device) answers as fast as it can, half over HTTP and
half over gRPC, with many requests in flight; every answer is checked. The table has three rows for
every process (private memory, file handles, threads) and a column for every look. The first look is
after a warm-up. Handles that grow, more than two threads, or more than 16 MiB from the first look
to the last make the exit code 1. After ``--seconds`` it stops, and says how far it came. Plans stay
as they are: a planner process that runs at a look would be counted.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from lab.support.add_clients import ADD, Requests, answer_up_to
from lab.support.processes import Held, held
from lab.support.served import ServeProcess
from lab.support.tables import print_table

LOOKS = 6
WARM_UP = 0.05  # of all requests
MOST_KIB = 16 << 10
MOST_THREADS = 2  # gRPC's pool has one more or less from time to time
CONFIG = """
[server]
http_port = 0
grpc_port = 0
fronts = 2
grace_seconds = 0
replan = false
"""


def run(count: int, seconds: float) -> bool:
    looks: list[dict[str, Held]] = []
    columns = ["process"]
    requests = Requests()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "models.toml"
        file.write_text(CONFIG + ADD)
        with ServeProcess(file, Path(folder) / "log") as server:
            parts = server.parts()
            begin_s = time.monotonic()
            requests.end_s = begin_s + seconds
            for wanted in np.linspace(WARM_UP * count, count, LOOKS).astype(int).tolist():
                asyncio.run(answer_up_to(server, requests, wanted))
                time.sleep(1.0)  # connections of the last look have ended
                looks.append({name: held(pid) for name, pid in parts.items()})
                columns.append(f"{requests.answered:,}")
                print(f"{requests.answered:,} of {count:,} requests", file=sys.stderr, flush=True)
                if not requests.more() and requests.answered < wanted:
                    break
            took_s = time.monotonic() - begin_s
            same = server.parts() == parts
            status = server.stop()
    rows = []
    for name in parts:
        of_looks = [look[name] for look in looks]
        rows.append([f"{name}, MiB", *(f"{one.private_kib / 1024:.1f}" for one in of_looks)])
        rows.append([f"{name}, handles", *(str(one.handles) for one in of_looks)])
        rows.append([f"{name}, threads", *(str(one.threads) for one in of_looks)])
    title = f"{requests.answered:,} requests in {took_s:.0f} s, half over HTTP and half over gRPC"
    print_table(title, columns, rows)
    grown = [
        name
        for name, now in looks[-1].items()
        for before in [looks[0][name]]
        if now.handles > before.handles
        or now.threads > before.threads + MOST_THREADS
        or now.private_kib > before.private_kib + MOST_KIB
    ]
    print(
        f"grown: {', '.join(grown) or 'none'}; processes {'the same' if same else 'NOT THE SAME'}"
    )
    return not grown and same and status == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    arguments = parser.parse_args()
    sys.exit(not run(arguments.requests, arguments.seconds))


if __name__ == "__main__":
    main()
