"""The planner process: makes deployments, and searches for better plans, away from what serves.

It reads one request and writes one answer. It may be killed at any time: nothing but the answer
depends on it. What plans is heavy (numba) and imported in ``main``: the server needs the structs.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import msgspec

from eclip.errors import EclipError
from eclip.server.config import ServingConfig
from eclip.server.control import Deployment
from eclip.server.log import ServerLog

_NICE = 10


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    config: ServingConfig
    rates_rps: dict[str, float]
    generation: int
    folder: str
    seconds: float  # of search; 0: none
    may_measure: bool  # models without a profile: nothing runs that it would disturb
    smallest: bool = False  # of every service the smallest bucket only


class PlanAnswer(msgspec.Struct, frozen=True, kw_only=True):
    deployment: Deployment | None = None
    error: str = ""


def main() -> None:
    """From stdin to stdout."""
    from eclip.server.device.deploying import make_deployment
    from eclip.server.device.models import announce_files
    from eclip.server.device.parts import Parts, process_age_s

    parts = Parts()
    parts.add("imports", process_age_s())

    request = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=PlanRequest)
    announce_files(request.config.services)
    if request.seconds:
        with contextlib.suppress(OSError):
            os.nice(_NICE)
    try:
        deployment = make_deployment(
            request.config,
            request.rates_rps,
            generation=request.generation,
            folder=Path(request.folder),
            seconds=request.seconds,
            log=ServerLog() if request.may_measure else None,
            parts=parts,
            smallest=request.smallest,
        )
        answer = PlanAnswer(deployment=deployment)
    except EclipError as error:
        answer = PlanAnswer(error=str(error))
    sys.stdout.buffer.write(msgspec.msgpack.encode(answer))
    sys.stdout.buffer.flush()
