"""Whether a plan's kernels can run on their lanes, asked before anything is built for it.

Only clusters can fail to fit: the blocks of one need their SMs close together, and the driver says
for each mask whether it has such a place. On an H200 the odd last slice alone holds no cluster of
4, 7 or 8.
"""

from __future__ import annotations

from collections.abc import Sequence

from eclip.core.program import Program
from eclip.core.trace import Kernel, Trace
from eclip.cuda.graphs import fits
from eclip.cuda.lanes import GpuLane
from eclip.errors import DeviceError
from eclip.gpu.pieces import KERNEL, CapturedGraph

_MOST_NAME = 60  # characters; names of templates are longer than a line


def check_clusters(
    program: Program,
    graphs: Sequence[CapturedGraph],
    traces: Sequence[Trace],
    lanes: Sequence[GpuLane],
) -> None:
    """Raise for the first kernel that does not fit its lane; equal launches are asked for once."""
    plan = program.plan
    asked: dict[tuple[Kernel, int], bool] = {}
    for route in program.all_routes():
        kernels = traces[route.worker].kernels
        nodes = [node for node in graphs[route.worker].nodes if node.kind == KERNEL]
        for position, (kernel, node) in enumerate(zip(kernels, nodes, strict=True)):
            lane = int(route.lane[position])
            if kernel.cluster <= 1:
                continue
            if (kernel, lane) not in asked:
                asked[kernel, lane] = fits(node, lanes[lane].stream)
            if not asked[kernel, lane]:
                raise DeviceError(
                    f"kernel {position} of {plan.workers[route.worker].name} "
                    f"({kernel.name[:_MOST_NAME]}) needs clusters of {kernel.cluster} blocks, "
                    f"which do not fit lane {lane} ({plan.units(lane)} SMs, slices "
                    f"{plan.lanes[lane].mask}); give it a lane with another slice, or profile "
                    f"the model on this GPU and plan again"
                )
