"""A model of your own beside bert. Needs no GPU: its kernel times come from a table.

On a GPU there is a shorter way. Write a function that takes the batch and returns a module and its
inputs, and let eclip measure it:

    eclip profile my_package:factory:4 -o mine
    eclip compare bert:8,my_package:factory:4 --profiles mine --device cuda
"""

from pathlib import Path

import eclip
from eclip.core.trace import Kernel, with_traces

# Microseconds of every kernel on 32, 64 and 132 SMs, its thread blocks, and blocks per SM.
TABLE = [
    ("embed", (6.0, 4.0, 3.5), 96, 8),
    ("attention", (84.0, 45.0, 24.0), 256, 1),
    ("expand", (120.0, 62.0, 31.0), 264, 1),
    ("shrink", (118.0, 60.0, 30.0), 264, 1),
    ("head", (22.0, 12.0, 7.0), 132, 2),
]
SIZES = (32, 64, 132)
GAP_NS = 1_000

h200 = eclip.load_builtin("h200", eclip.Topology)
trace = eclip.Trace(
    model=eclip.ModelKey("my_model", 4),
    kernels=tuple(
        Kernel(name=name, grid=(blocks, 1, 1), block=(256, 1, 1)) for name, _, blocks, _ in TABLE
    ),
)
busy_ns = tuple(tuple(round(1000 * us) for us in times) for _, times, _, _ in TABLE)
profile = eclip.Profile(
    trace=trace,
    fingerprint=with_traces(h200.fingerprint, [trace]),
    modelled=True,
    source="a table in this example",
    sizes=SIZES,
    request_ns=tuple(sum(row[i] + GAP_NS for row in busy_ns) for i in range(len(SIZES))),
    busy_ns=busy_ns,
    gap_ns=((GAP_NS,) * len(SIZES),) * len(TABLE),
    spread_ns=((0,) * len(SIZES),) * len(TABLE),
    dram_bytes=(0,) * len(TABLE),
    l2_bytes=(0,) * len(TABLE),
    blocks_per_unit=tuple(resident for _, _, _, resident in TABLE),
    footprint=None,  # not known, so it is not counted
)
Path("mine").mkdir(exist_ok=True)
eclip.save(profile, "mine/my_model-4.json.gz")

case = eclip.case("bert:8,my_model:4", profiles="mine")
outcome = eclip.compare(case, ["shared", "model", "masks"], seconds=0.2)
print(outcome)
