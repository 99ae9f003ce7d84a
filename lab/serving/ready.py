"""Time to ready of a server, by parts.

    PYTHONPATH=.:src:tests/support:.gpu-deps python3 lab/serving/ready.py --device cuda
        [--services bert/8ms,vit_b_16/8ms,squeezenet/5ms] [--batches 1,8] [--rate 300] [--cold]

Services are models of the zoo or factories, each with its bound. A factory is
``lab.serving.unseen:net/20ms``, which has one input and one output of [128, 1024] in FP16; for
another give --inputs and --outputs as in a configuration, as JSON. The bench is the front, so
protocols are not measured. It prints the server's log, and as its last line the seconds until the
server is ready, until every service has answered, and until every bucket is there (or --wait is
over). --cold: numba's cache is empty. Profiles that are made go to a folder that is removed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from lab.support.offered import zeros

from served_core import Driver, config_of, request

_PATIENCE_S = 580.0
_LOOK_S = 0.05


def settings_of(given: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for word in given.services.split(","):
        model, _, bound = word.partition("/")
        one: dict[str, Any] = {"name": model.rpartition(":")[2], "model": model, "rate": given.rate}
        if bound:
            one["bound"] = bound
        if given.batches:
            one["batches"] = [int(size) for size in given.batches.split(",")]
        if ":" in model:
            one |= {"inputs": json.loads(given.inputs), "outputs": json.loads(given.outputs)}
        found.append(one)
    return found


def buckets_of(driver: Driver) -> dict[str, tuple[int, ...]]:
    services = driver.served.core.behind.services
    return {name: service.spec.buckets for name, service in services.items()}


def measure(given: argparse.Namespace, profiles: str) -> dict[str, Any]:
    settings = settings_of(given)
    staged = None if given.staged == "usual" else given.staged == "yes"
    server = {"device": given.device, "profiles": [profiles], "staged": staged}
    begin_s = time.monotonic()
    with Driver(config_of(*settings, **server), patience_s=_PATIENCE_S) as driver:
        ready_s = time.monotonic() - begin_s
        first = buckets_of(driver)
        core = driver.served.core
        for name in core.models:
            driver(core.infer(request(name, zeros(core.models[name], 1))))
        answered_s = time.monotonic() - begin_s
        while not given.only_ready and (wait_s := given.wait - time.monotonic() + begin_s) > 0:
            time.sleep(min(_LOOK_S, wait_s))
            if '"complete"' in driver.served.log.getvalue():
                break
        complete_s = time.monotonic() - begin_s
        print(driver.served.log.getvalue(), flush=True)
        return {
            "ready_s": round(ready_s, 2),
            "all_answered_s": round(answered_s, 2),
            "buckets_when_ready": first,
            "looked_until_s": round(complete_s, 2),
            "buckets_then": buckets_of(driver),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="sim")
    parser.add_argument("--services", default="bert/8ms,vit_b_16/8ms,squeezenet/5ms")
    parser.add_argument("--batches", default="")
    parser.add_argument("--rate", type=float, default=300.0)
    tensor = [{"name": "x", "datatype": "FP16", "shape": [128, 1024]}]
    parser.add_argument("--inputs", default=json.dumps(tensor))
    parser.add_argument("--outputs", default=json.dumps(tensor))
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--staged", choices=("usual", "yes", "no"), default="usual")
    parser.add_argument("--only-ready", action="store_true", help="do not wait for further buckets")
    parser.add_argument("--wait", type=float, default=120.0, help="for further buckets, at most")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.cold:
            os.environ["NUMBA_CACHE_DIR"] = str(Path(folder, "numba"))
        profiles = Path(folder, "profiles")
        profiles.mkdir()
        print(json.dumps(measure(given, str(profiles))))


if __name__ == "__main__":
    main()
