"""eclip: several ML models on one GPU at once, each kernel group on its own compute units.

    plan = eclip.plan("albert:8,vgg19:8", policy="search", seconds=10)
    log = eclip.run(plan)  # on the built-in simulator; device="cuda" runs it on a GPU
    eclip.report([log], "report.html")

This is the public API; everything else may change without notice. Names are imported when they are
first used, so that ``import eclip`` takes no time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eclip.api import case as case
    from eclip.api import colocate as colocate
    from eclip.api import compare as compare
    from eclip.api import plan as plan
    from eclip.api import report as report
    from eclip.api import request as request
    from eclip.api import run as run
    from eclip.api import search as search
    from eclip.api import serve as serve
    from eclip.contest.contest import CompareOptions as CompareOptions
    from eclip.contest.outcome import Outcome as Outcome
    from eclip.core.calibration import Calibration as Calibration
    from eclip.core.measures import Measures as Measures
    from eclip.core.measures import measure as measure
    from eclip.core.mix import Mix as Mix
    from eclip.core.mix import parse_mix as parse_mix
    from eclip.core.model_key import ModelKey as ModelKey
    from eclip.core.plan import Plan as Plan
    from eclip.core.profile import Profile as Profile
    from eclip.core.runlog import RunLog as RunLog
    from eclip.core.topology import Topology as Topology
    from eclip.core.trace import Trace as Trace
    from eclip.errors import ArtefactError as ArtefactError
    from eclip.errors import DeviceError as DeviceError
    from eclip.errors import EclipError as EclipError
    from eclip.errors import MismatchError as MismatchError
    from eclip.errors import PlanningError as PlanningError
    from eclip.errors import StoppedError as StoppedError
    from eclip.errors import UsageError as UsageError
    from eclip.files.comparison import Comparison as Comparison
    from eclip.files.observations import Observations as Observations
    from eclip.files.store import load as load
    from eclip.files.store import load_builtin as load_builtin
    from eclip.files.store import save as save
    from eclip.planner.case import Case as Case
    from eclip.planner.policies import PolicyOptions as PolicyOptions
    from eclip.planner.search.objective import Objective as Objective
    from eclip.progress import Progress as Progress
    from eclip.pytorch.background import Background as Background
    from eclip.pytorch.background import background as background
    from eclip.pytorch.lanes import Lane as Lane
    from eclip.pytorch.lanes import lane as lane
    from eclip.pytorch.lanes import split as split

_ROOMS = {
    "api": ("case", "colocate", "compare", "plan", "report", "request", "run", "search", "serve"),
    "core.calibration": ("Calibration",),
    "files.comparison": ("Comparison",),
    "core.measures": ("Measures", "measure"),
    "core.mix": ("Mix", "parse_mix"),
    "core.model_key": ("ModelKey",),
    "files.observations": ("Observations",),
    "core.plan": ("Plan",),
    "core.profile": ("Profile",),
    "core.runlog": ("RunLog",),
    "files.store": ("load", "load_builtin", "save"),
    "core.topology": ("Topology",),
    "core.trace": ("Trace",),
    "errors": (
        "ArtefactError",
        "DeviceError",
        "EclipError",
        "MismatchError",
        "PlanningError",
        "StoppedError",
        "UsageError",
    ),
    "planner.case": ("Case",),
    "contest.contest": ("CompareOptions",),
    "contest.outcome": ("Outcome",),
    "planner.policies": ("PolicyOptions",),
    "planner.search.objective": ("Objective",),
    "progress": ("Progress",),
    "pytorch.background": ("Background", "background"),
    "pytorch.lanes": ("Lane", "lane", "split"),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}
__all__ = sorted(_ROOM_OF)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("eclip.core.made").version()
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'eclip' has no attribute {name!r}")
    value = getattr(import_module(f"eclip.{_ROOM_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
