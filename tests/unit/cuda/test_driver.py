"""A GPU that is full, and the spare context that makes graphs faster: made once, never in the way,
gone in the end."""

from __future__ import annotations

import enum
from typing import Any

import pytest

from eclip.cuda import driver
from eclip.cuda.driver import Gpu
from eclip.errors import DeviceError


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_DEVICE_UNAVAILABLE = 46


class FakeDriver:
    """Contexts that can be made, made current and destroyed; one call may fail."""

    CUresult = Result

    def __init__(self, failing: str = "", status: Result = Result.CUDA_ERROR_OUT_OF_MEMORY) -> None:
        self.current = ""
        self.calls: list[str] = []
        self._failing = failing
        self._status = status

    def __getattr__(self, name: str) -> Any:
        def function(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            if name == self._failing:
                return (self._status, None)
            if name == "cuCtxSetCurrent":
                self.current = arguments[0]
            given = {
                "cuDeviceGetCount": 1,
                "cuDeviceGet": 0,
                "cuDevicePrimaryCtxRetain": "primary",
                "cuCtxCreate": "spare",
                "cuMemAlloc": 4096,
                "cuGetErrorString": b"out of memory",
            }
            if name == "cuCtxCreate":
                self.current = "spare"
            return (Result.CUDA_SUCCESS, given[name]) if name in given else (Result.CUDA_SUCCESS,)

        function.__name__ = name
        return function


def gpu_on(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    monkeypatch.setattr(driver, "cu", fake)
    return Gpu(0, connections=None)


def test_gpu_without_room_for_another_process_is_told_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(DeviceError, match=r"no room for another process on GPU 0.*channels"):
        gpu_on(FakeDriver("cuDevicePrimaryCtxRetain"), monkeypatch)


def test_another_refusal_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver("cuDevicePrimaryCtxRetain", Result.CUDA_ERROR_DEVICE_UNAVAILABLE)
    with pytest.raises(DeviceError, match=r"^cuDevicePrimaryCtxRetain failed.*UNAVAILABLE"):
        gpu_on(fake, monkeypatch)


def test_spare_context_is_made_once_works_every_time_and_goes_with_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeDriver()
    gpu = gpu_on(fake, monkeypatch)
    assert "cuCtxCreate" not in fake.calls
    for _ in range(3):
        gpu.quicken()
        assert fake.current == "primary"
    assert fake.calls.count("cuCtxCreate") == 1
    assert fake.calls.count("cuMemsetD8") == 3
    gpu.close()
    assert fake.calls.count("cuCtxDestroy") == 1


@pytest.mark.parametrize("failing", ["cuCtxCreate", "cuMemAlloc", "cuMemsetD8", "cuCtxSynchronize"])
def test_gpu_without_room_for_a_spare_context_goes_on_as_it_was(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeDriver(failing)
    gpu = gpu_on(fake, monkeypatch)
    for _ in range(2):
        gpu.quicken()
        assert fake.current == "primary"
    assert fake.calls.count(failing) == 1
    made = failing != "cuCtxCreate"
    assert fake.calls.count("cuCtxDestroy") == made
    gpu.close()
    assert fake.calls.count("cuCtxDestroy") == made
