"""A GPU whose driver spins until its device has ended, as CUDA's does. It is built with g++."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

from eclip.devices.gpu.loop import EntryPoints

# A launch takes so long for the first so many, and then shorter.
DRIVER = """
#include <cstdint>
#include <ctime>
namespace {
uint64_t read(clockid_t clock) {
    timespec time;
    clock_gettime(clock, &time);
    return time.tv_sec * 1000000000ull + time.tv_nsec;
}
uint64_t ends;
}  // namespace
extern "C" {
uint64_t slow, slow_ns, fast_ns, spun_ns;
uint64_t launch(uint64_t, uint64_t, uint64_t) {
    ends = read(CLOCK_MONOTONIC) + (slow > 0 ? slow_ns : fast_ns);
    slow -= slow > 0;
    return 0;
}
uint64_t nothing(uint64_t, uint64_t, uint64_t) { return 0; }
uint64_t wait(uint64_t, uint64_t, uint64_t) {
    uint64_t begin = read(CLOCK_THREAD_CPUTIME_ID);
    while (read(CLOCK_MONOTONIC) < ends) {}
    spun_ns += read(CLOCK_THREAD_CPUTIME_ID) - begin;
    return 0;
}
}
"""


class SpinningGpu:
    """``folder`` is for the library."""

    def __init__(self, folder: Path) -> None:
        source, library = folder / "driver.cpp", folder / "libdriver.so"
        source.write_text(DRIVER)
        subprocess.run(["g++", "-O2", "-shared", "-fPIC", source, "-o", library], check=True)
        self.entry_points = EntryPoints(
            str(library), "launch", "nothing", "nothing", "nothing", "wait"
        )
        loaded = ctypes.CDLL(str(library))
        names = ("slow", "slow_ns", "fast_ns", "spun_ns")
        self._words = {name: ctypes.c_uint64.in_dll(loaded, name) for name in names}

    def take(self, fast_ns: int, *, slow: int = 0, slow_ns: int = 0) -> None:
        """So long for a launch, and for the next few so much longer."""
        for name, value in (("slow", slow), ("slow_ns", slow_ns), ("fast_ns", fast_ns)):
            self._words[name].value = value
        self._words["spun_ns"].value = 0

    @property
    def spun_ns(self) -> int:
        return self._words["spun_ns"].value

    def make_current(self) -> None:
        pass

    def describe(self, status: int) -> str:
        return str(status)
