"""eclip: several ML models on one GPU at once, each kernel group on its own compute units.

This is the public API; everything else may change without notice. Profiles become plans, plans run
on a device, runs become measures:

    topology = load_builtin(Topology, "h200")
    problem = Problem(mix, topology, profiles)
    plan = make_plan("eclip", problem)
"""

from importlib.metadata import PackageNotFoundError, version

from eclip.calibration import Calibration
from eclip.errors import EclipError
from eclip.measures import Measures, measure
from eclip.mix import Mix, parse_mix
from eclip.plan import Plan
from eclip.profile import Profile
from eclip.runlog import RunLog
from eclip.store import load, load_any, load_builtin, save
from eclip.topology import Mask, Topology
from eclip.trace import Trace

try:
    __version__ = version("eclip")
except PackageNotFoundError:  # run from a checkout through PYTHONPATH
    __version__ = "0+checkout"

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
    "load",
    "load_any",
    "load_builtin",
    "measure",
    "parse_mix",
    "save",
]
