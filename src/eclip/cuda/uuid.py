"""The UUID of a GPU, asked of the driver's library itself: no Python package and no context."""

from __future__ import annotations

import ctypes
from typing import Any

from eclip.errors import DeviceError

LIBRARY = "libcuda.so.1"


def uuid_of(index: int) -> str:
    """The UUID of this GPU, as NVIDIA's tools write it."""
    try:
        driver: Any = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise DeviceError(f"there is no working CUDA driver here: {error}") from None
    status = driver.cuInit(0)
    if status:
        raise DeviceError(f"there is no working CUDA driver here: cuInit gives status {status}")
    count, device, digits = ctypes.c_int(), ctypes.c_int(), (ctypes.c_ubyte * 16)()
    driver.cuDeviceGetCount(ctypes.byref(count))
    if not 0 <= index < count.value:
        raise DeviceError(f"there is no GPU {index}; this host has {count.value}, counted from 0")
    status = driver.cuDeviceGet(ctypes.byref(device), index)
    status = status or driver.cuDeviceGetUuid(digits, device)
    if status:
        raise DeviceError(f"the UUID of GPU {index} cannot be read: status {status}")
    text = bytes(digits).hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
