"""Memory traffic of kernels, by Nsight Compute: DRAM and L2 bytes of every kernel of a model.

The counters are read in a child process under ``ncu``, clocks and caches left alone, for one launch
of each distinct kernel (name, grid, block). Launches like it get bytes by their time: a kernel that
walks over its tiles has one grid for problems of any size. Only the child imports torch.
"""

from __future__ import annotations

import csv
import io
import itertools
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from eclip.core.model_key import parse_model
from eclip.core.profile import Profile
from eclip.core.trace import Kernel, Trace
from eclip.errors import DeviceError

_METRICS = ("dram__bytes.sum", "lts__t_bytes.sum")
# Times of launches alike that differ by more than this were measured beside other kernels.
_MOST_LONGER = 4.0


def with_traffic(profiles: Sequence[Profile], gpu: int, timeout_s: float) -> list[Profile]:
    """The profiles with measured bytes; all models are counted in one child process."""
    rows = _count([str(profile.model) for profile in profiles], gpu, timeout_s)
    done = []
    for profile in profiles:
        distinct = distinct_kernels(profile.trace)
        mine, rows = rows[: len(distinct)], rows[len(distinct) :]
        if len(mine) < len(distinct):
            raise DeviceError(f"ncu counted too few kernels of {profile.model}; profile it again")
        done.append(_spread(profile, dict(zip(distinct, mine, strict=True))))
    return done


def _spread(profile: Profile, counted: Mapping[int, tuple[int, int]]) -> Profile:
    """The profile with bytes for every launch, from those counted by position."""
    busy_ns = profile.busy_at(profile.sizes[-1])
    first = {_identity(profile.trace.kernels[position]): position for position in counted}
    like = [first[_identity(kernel)] for kernel in profile.trace.kernels]
    longer = np.clip(busy_ns / busy_ns[like], 1 / _MOST_LONGER, _MOST_LONGER)
    rows = np.array([counted[position] for position in like]).T * longer
    dram_bytes, l2_bytes = np.rint(rows).astype(int).tolist()
    return msgspec.structs.replace(profile, dram_bytes=tuple(dram_bytes), l2_bytes=tuple(l2_bytes))


def distinct_kernels(trace: Trace) -> list[int]:
    """Positions of the first launch of each distinct kernel, in launch order."""
    first: dict[tuple[object, ...], int] = {}
    for position, kernel in enumerate(trace.kernels):
        first.setdefault(_identity(kernel), position)
    return sorted(first.values())


def _identity(kernel: Kernel) -> tuple[object, ...]:
    return kernel.name, kernel.grid, kernel.block


def _count(keys: Sequence[str], gpu: int, timeout_s: float) -> list[tuple[int, int]]:
    ncu = shutil.which("ncu")
    if ncu is None:
        raise DeviceError(
            "ncu (Nsight Compute) is not on the PATH; install it, or count no traffic (no ncu)"
        )
    command = [
        *(ncu, "--clock-control", "none", "--cache-control", "none", "--graph-profiling", "node"),
        *("--profile-from-start", "off", "--metrics", ",".join(_METRICS), "--csv", "--page", "raw"),
        *(sys.executable, "-m", "eclip.capture.traffic", str(gpu), *keys),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise DeviceError(f"ncu did not finish within {timeout_s:g} s") from None
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise DeviceError(f"ncu failed: {last[0] if last else 'no output'}")
    return _parse(done.stdout)


def _parse(text: str) -> list[tuple[int, int]]:
    """Bytes of every kernel in ncu's CSV; its second row gives the units."""
    table = text[text.find('"ID"') :]
    rows = list(csv.DictReader(io.StringIO(table)))
    scale = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
    units = [rows[0].get(metric) for metric in _METRICS] if rows else []
    if not units or any(unit not in scale for unit in units):
        raise DeviceError(f"ncu gave a table in units {units} that eclip cannot read")
    factors = [scale[unit] for unit in units if unit is not None]
    counted = []
    for row in rows[1:]:
        dram, l2 = (
            round(float(row[metric].replace(",", "")) * factor)
            for metric, factor in zip(_METRICS, factors, strict=True)
        )
        counted.append((dram, l2))
    return counted


def _launch_distinct(gpu: int, keys: Sequence[str]) -> None:
    """Launch each model's distinct kernels once, in the parent's order. This runs under ncu."""
    import torch

    from eclip.capture import named as models
    from eclip.capture.torch import capture
    from eclip.cuda.driver import Gpu, call, cu
    from eclip.cuda.graphs import place_segment

    device = Gpu(gpu)
    torch.cuda.set_device(gpu)
    for key in keys:
        model = parse_model(key)
        module, inputs = models.build(model)
        captured = capture(module, inputs, model)
        graph = captured.capture.graph
        wanted = set(distinct_kernels(captured.capture.trace))
        contexts = [device.context] * graph.kernel_count
        # All kernels run, in order, so that none reads what its predecessor did not write; the
        # counters are on for the distinct ones only.
        for counted, run in itertools.groupby(range(graph.kernel_count), wanted.__contains__):
            positions = list(run)
            kernels = range(positions[0], positions[-1] + 1)
            executable = place_segment(graph, contexts, kernels)
            if counted:
                call(cu.cuProfilerStart)
            call(cu.cuGraphLaunch, executable.handle, 0)
            torch.cuda.synchronize()
            if counted:
                call(cu.cuProfilerStop)
            executable.close()
        del captured, graph
        torch.cuda.empty_cache()


if __name__ == "__main__":
    _launch_distinct(int(sys.argv[1]), sys.argv[2:])
