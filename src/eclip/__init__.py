"""eclip: several ML models on one GPU at once, each kernel group on its own compute units.

This is the public API; everything else may change without notice. The command line makes the files,
Python reads them:

    log = load(Path("run.json"), RunLog)
    print(measure(log).stp, log.plan.why)
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from eclip.artefacts.calibration import Calibration
from eclip.artefacts.measures import Measures, measure
from eclip.artefacts.mix import Mix, parse_mix
from eclip.artefacts.plan import Plan
from eclip.artefacts.profile import Profile
from eclip.artefacts.runlog import RunLog
from eclip.artefacts.store import load, load_any, load_builtin, save
from eclip.artefacts.topology import Mask, Topology
from eclip.artefacts.trace import Trace
from eclip.errors import EclipError

if TYPE_CHECKING:
    from eclip.lab.colocate import Colocation

try:
    __version__ = version("eclip")
except PackageNotFoundError:  # run from a checkout through PYTHONPATH
    __version__ = "0+checkout"


def colocate(models: Mapping[str, Any], policy: str = "eclip", gpu: int = 0) -> Colocation:
    """Several PyTorch models, each ``name: (module, inputs)``, on one GPU under a policy."""
    from eclip.lab.colocate import Colocation

    return Colocation(models, policy, gpu)


def request(worker: int = -1) -> None:
    """Mark, for ``eclip exec``, that this thread's next launch begins a request.

    ``worker`` is its number in the plan, or -1 to let libeclip find out. Outside of ``eclip exec``
    this does nothing.
    """
    from eclip.frontends.transparent import mark_request

    mark_request(worker)


__all__ = [
    "Calibration",
    "EclipError",
    "Mask",
    "Measures",
    "Mix",
    "Plan",
    "Profile",
    "RunLog",
    "Topology",
    "Trace",
    "colocate",
    "load",
    "load_any",
    "load_builtin",
    "measure",
    "parse_mix",
    "request",
    "save",
]
