"""Files as a person may edit them: a small file of every kind that eclip wrote, one number changed.

``Edited`` lets eclip write the files, and lists edits: every value of NASTY for every number, and
lists made empty, shorter and longer. ``COMMANDS`` are the commands that read a file of a kind.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from artefacts import with_value
from eclip.core.calibration import Calibration
from eclip.core.topology import Topology
from eclip.files import store
from eclip.files.machine import Machine
from eclip.files.observations import Observations
from eclip.planner.case import make_case

NASTY: tuple[Any, ...] = (
    *(0, -1, 1, 7, 10**6, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30),
    *(0.5, -0.5, 1e-300, 1e300, None, "7"),
)
_FLEET = """
objective = "fewest"
[[service]]
name = "a"
model = "squeezenet:1"
rate = 300
bound = "5ms"
instances = 2
[[service]]
name = "b"
model = "alexnet:1"
rate = 200
bound = "8ms"
[[gpus]]
machine = "m"
kind = "h200"
count = 2
"""
# Run in the folder of the file; FILE is its name.
COMMANDS: dict[str, tuple[str, ...]] = {
    "plan": (
        "explain FILE",
        "run FILE --seconds 0.01 --warmup 0 -o again.json",
        "report FILE -o page.html",
    ),
    "searched": (
        "explain FILE",
        "run FILE --seconds 0.01 --warmup 0 -o again.json",
        "report FILE -o page.html",
    ),
    "run": ("inspect FILE", "report FILE -o page.html --trace trace.json.gz"),
    "served": ("inspect FILE", "report FILE -o page.html --trace trace.json.gz"),
    "comparison": ("inspect FILE", "results FILE --markdown", "report FILE -o page.html"),
    "topology": (
        "inspect FILE",
        "plan squeezenet:1,alexnet:1 --topology FILE -o again.json",
    ),
    "calibration": (
        "inspect FILE",
        "compare squeezenet:3@20rps/30ms,alexnet:3 --policies shared,yield,timeslice,kernel "
        "--calibration FILE --seconds 0.01 --set warmup=0",
    ),
    "profile": (
        "inspect FILE",
        "plan squeezenet:1,alexnet:1 --policy kernel --profiles . -o again.json",
    ),
    "trace": ("inspect FILE",),
    "observations": ("inspect FILE", "calibrate --from FILE -o again.json"),
    "lengths": ("inspect FILE", "varout estimate FILE"),
    "machine": ("inspect FILE", "varout compare --machine FILE --ratios 1,2"),
    "gpu-machine": ("inspect FILE", "varout compare --machine FILE --ratios 1,2"),
    "placement": ("inspect FILE", "fleet plan fleet.toml --running FILE --steps 3"),
    "scores": ("inspect FILE", "fleet plan fleet.toml --scores FILE --steps 3"),
}


class Edit(NamedTuple):
    kind: str
    path: tuple[Any, ...]
    value: Any


class Edited:
    """Files of every kind in a folder, and edits of their numbers."""

    def __init__(self, folder: Path, eclip: Callable[..., None]) -> None:
        """``eclip`` runs a command in the folder."""
        self.folder = folder
        self.contents: dict[str, Any] = {}
        (folder / "fleet.toml").write_text(_FLEET)
        (folder / "lengths.txt").write_text("3\n1\n4\n1\n5\n")
        tiers = "squeezenet:1@200rps/9ms,alexnet:1@background/floor=0.1"
        ran = "--warmup 0 --seconds 0.02"
        for command in (
            "plan squeezenet:1,alexnet:1 -o plan.json",
            f"plan {tiers} --policy search --batches 1 -o searched.json",
            f"run plan.json {ran} --trace-ms 1 -o run.json",
            f"run searched.json {ran} --trace-ms 1 -o served.json",
            f"compare {tiers} --policies shared,timeslice,yield --seconds 0.02 --repeats 2 "
            "--results comparison.json",
            "varout estimate lengths.txt -o lengths.json",
            "fleet plan fleet.toml --steps 1 -o placement.json --scores scores.json",
        ):
            eclip(*command.split())
        h200 = store.load_builtin("h200", Calibration)
        self._keep("calibration", h200)
        self._keep("topology", store.load_builtin("h200", Topology))
        self._keep("machine", store.load_builtin("imagine", Machine))
        self._keep("gpu-machine", store.load_builtin("h200", Machine))
        profile = make_case("squeezenet:1").profiles[0]
        self._keep("profile", profile)
        self._keep("trace", profile.trace)
        observed = store.load_builtin("h200", Observations)
        self._keep("observations", msgspec.structs.replace(observed, runs=observed.runs[:3]))
        for kind in COMMANDS:
            if kind not in self.contents:
                data = json.loads(unpacked(folder / f"{kind}.json"))
                data.pop("digest", None)
                self.contents[kind] = data

    def _keep(self, kind: str, artefact: store.Artefact) -> None:
        path = self.folder / f"{kind}.json"
        store.save(artefact, path)

    def edits(self, random: random.Random) -> Iterator[Edit]:
        """Every nasty value for every field, each in one of the field's places."""
        for kind, content in self.contents.items():
            for places in fields_of(content).values():
                for index in range(len(NASTY)):
                    place = random.choice(places)
                    old = value_at(content, place)
                    if not isinstance(old, list):
                        yield Edit(kind, place, NASTY[index])
                    elif index < 3:
                        yield Edit(kind, place, ([], old[:1], old + old)[index])

    def write(self, edit: Edit) -> Path:
        path = self.folder / f"edited-{edit.kind}.json"
        path.write_text(json.dumps(with_value(self.contents[edit.kind], edit.path, edit.value)))
        return path


def unpacked(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data


def fields_of(content: Any) -> dict[tuple[Any, ...], list[tuple[Any, ...]]]:
    """The paths of all numbers and lists, by the path with every index left out."""
    fields: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    for path in _places(content, ()):
        named = tuple("*" if isinstance(part, int) else part for part in path)
        fields.setdefault(named, []).append(path)
    return fields


def value_at(content: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        content = content[part]
    return content


def _places(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, list) or (isinstance(value, int | float) and not isinstance(value, bool)):
        yield path
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _places(part, (*path, key))
