"""How many processes with lanes fit on a GPU at once (docs/design.md).

    CUDA_DEVICE_MAX_CONNECTIONS=32 PYTHONPATH=.:src:.gpu-deps python3 lab/gpu/channels.py [LANES]

Processes with so many lanes of two slices are opened one after another, until one is refused.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys

MOST = 64
CHILD = """
import sys
from eclip.core.topology import Mask
from eclip.cuda.device import CudaDevice
from eclip.cuda.driver import free_memory
from eclip.cuda.lanes import LanePool
from eclip.errors import DeviceError
try:
    device = CudaDevice()
    slices = len(device.topology.slice_units)
    pairs = [(at % slices, (at + 1 + at // slices) % slices) for at in range(int(sys.argv[1]))]
    pool = LanePool(device.slices, [Mask(pair) for pair in pairs])
    print(f"open, {free_memory() >> 30} GiB free", flush=True)
except DeviceError as error:
    print(f"refused: {error}", flush=True)
sys.stdin.read()
"""


def main(lanes: str) -> None:
    with contextlib.ExitStack() as stack:
        for count in range(1, MOST + 1):
            child = subprocess.Popen(
                [sys.executable, "-c", CHILD, lanes],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(child.kill)
            assert child.stdout is not None
            said = child.stdout.readline().strip()
            print(f"process {count} with {lanes} lanes: {said or 'died'}", flush=True)
            if not said.startswith("open"):
                return


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else "16")
