"""What the stored plans of docs/plans give on the simulator, to the last digit, as one line each.

Two checkouts on one machine compare by their lines: equal lines mean equal requests, kernels,
energy, counters and rates alone.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import eclip

_SECONDS = 1.0
_TRACE_MS = 5.0


def main() -> None:
    for path in sorted(Path(__file__).parents[1].glob("docs/plans/*.json")):
        log = eclip.run(path, seconds=_SECONDS, trace_ms=_TRACE_MS)
        seen = (log.requests, log.kernels, log.energy_uj, log.counters, log.alone_rps)
        digest = hashlib.sha256(repr(seen).encode()).hexdigest()[:16]
        print(f"{path.stem:20} {digest} {len(log.requests.worker):6} requests")


if __name__ == "__main__":
    main()
