"""Exports: files that eclip writes for other programs, and how ``eclip inspect`` tells them apart.

An export is no artefact: eclip does not read it again, except placements and scores of a fleet.
"""

from __future__ import annotations

import html
import json
import re
from dataclasses import dataclass
from pathlib import Path

from eclip.errors import ArtefactError
from eclip.files import store
from eclip.fleet.kubernetes import MARK as MANIFESTS_MARK
from eclip.fleet.place.placement import Placement, decode_placement
from eclip.fleet.place.scores import MARK as SCORES_MARK
from eclip.fleet.place.scores import decode_scores
from eclip.reports.fleet_day import TITLE as DAY_TITLE
from eclip.reports.marks import REPORT_MARK, TRACE_MARK

Facts = dict[str, str]


@dataclass(frozen=True)
class Export:
    kind: str
    facts: Facts
    placement: Placement | None = None


def read_export(path: Path) -> Export | None:
    """The export in a file; None: the file is none, or cannot be read."""
    try:
        data = store.read_bytes(path)
    except (ArtefactError, OSError):
        return None
    where, begin = str(path), data[:4096]
    if SCORES_MARK in begin:
        return Export("scores of a fleet", _scores(data, where))
    if begin.lstrip().startswith(b"{") and b'"goodput_rps"' in data and b'"gpus"' in data:
        return Export("placement of a fleet", {}, decode_placement(data, where))
    if data.startswith(MANIFESTS_MARK):
        return Export("Kubernetes manifests", _manifests(data))
    if b"<svg" in begin and DAY_TITLE.encode() in data:
        return Export("picture of a simulated day", {"next": "open the file in a browser"})
    if b"<html" in begin and REPORT_MARK in data:
        return Export("report", _report(data))
    if begin.startswith(b"{") and TRACE_MARK in data:
        return Export("Chrome trace", _trace(data, where))
    return None


def _scores(data: bytes, where: str) -> Facts:
    kept = decode_scores(data, where)
    kinds = [kind for kind, _, _ in kept.entries]
    return {
        "sets": str(len(kinds)),
        **{f"on {kind}": f"{kinds.count(kind)} sets of services" for kind in kept.digests},
        "next": "give the file to `eclip fleet plan --scores`",
    }


def _manifests(data: bytes) -> Facts:
    kinds = re.findall(rb"^kind: (\w+)", data, re.MULTILINE)
    counts = {kind.decode(): kinds.count(kind) for kind in kinds}
    return {
        "objects": ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "none",
        "next": "kubectl apply -f FILE",
    }


def _report(data: bytes) -> Facts:
    title = re.search(rb"<title>(.*?)</title>", data, re.DOTALL)
    return {
        "title": html.unescape(title[1].decode(errors="replace")) if title else "none",
        "next": "open the file in a browser",
    }


def _trace(data: bytes, where: str) -> Facts:
    try:
        document = json.loads(data)
        origin, events = document["otherData"], document["traceEvents"]
        facts = {name: str(origin[name]) for name in ("policy", "mix", "device", "load")}
        count = str(len(events))
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ArtefactError(
            f"{where} is a Chrome trace, but damaged or not made by eclip"
        ) from None
    return {**facts, "events": count, "next": "open the file at https://ui.perfetto.dev"}
