"""Unmodified programs in processes of their own, under libeclip, on the stand-in driver.

They are Python programs that reach the driver by ctypes, with or without the interpreter's lock.
What they did they write into memory that they share with the test.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from native_build import Native

# ``launch`` gives a kernel of so many microseconds to a stream; ``locked`` keeps the interpreter's
# lock meanwhile. ``say(k)`` counts in the k-th word that the test reads; times of launches follow.
PRELUDE = """
import ctypes, mmap, os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)
cuda, locked = ctypes.CDLL("libcuda.so.1"), ctypes.PyDLL("libcuda.so.1")
u64 = ctypes.c_uint64
memory = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 0)
words = (ctypes.c_int64 * (len(memory) // 8)).from_buffer(memory)
FIRST = 16
for library in (cuda, locked):
    library.standin_function.restype = u64
    library.standin_function.argtypes = [ctypes.c_char_p, u64, ctypes.c_int, ctypes.c_int]
    library.cuLaunchKernel.argtypes = [u64, *[ctypes.c_uint] * 7, u64, u64, u64]
    library.cuStreamSynchronize.argtypes = [u64]
cuda.standin_timed.restype = u64
timed = cuda.standin_timed()
def check(status):
    assert status == 0, status
def kernel(name=b"busy"):
    return cuda.standin_function(name, timed, 2, 1)
check(cuda.cuInit(0))
context = u64()
check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
check(cuda.cuCtxSetCurrent(context))
usual = kernel()
def now():
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)
def say(word, more=1):
    words[word] += more
def launch(us, function=None, stream=0, library=cuda):
    values = (u64 * 2)(0, us)
    pointers = (u64 * 2)(ctypes.addressof(values), ctypes.addressof(values) + 8)
    check(library.cuLaunchKernel(function or usual, 1, 1, 1, 1, 1, 1, 0, stream,
                                 ctypes.addressof(pointers), 0))
    words[FIRST + words[0] % (len(words) - FIRST)] = now()
    say(0)
def new_stream(flags=1):
    made = u64()
    check(cuda.cuStreamCreate(ctypes.byref(made), flags))
    return made.value
def new_event():
    made = u64()
    check(cuda.cuEventCreate(ctypes.byref(made), 0))
    return made.value
source, target = u64(1), u64(0)
def copy(call):
    check(call(u64(ctypes.addressof(target)), u64(ctypes.addressof(source)), u64(8), u64(0)))
def synchronise(stream=0):
    check(cuda.cuStreamSynchronize(stream))
"""
FIRST = 16
_WORDS = 1 << 17


class Running:
    """A program that runs."""

    def __init__(self, child: subprocess.Popen[str], words: npt.NDArray[np.int64]) -> None:
        self.child = child
        self.words = words

    @property
    def launched(self) -> int:
        return int(self.words[0])

    def has_launched(self, number: int) -> bool:
        """Counted from 0."""
        return self.launched > number

    def launched_after(self, ns: int) -> int:
        times = self.words[FIRST : FIRST + self.launched]
        return int((times > ns).sum())


@contextlib.contextmanager
def running(
    native: Native, folder: Path, body: str, tier: str | None, **variables: str
) -> Iterator[Running]:
    """Run the body as a program of this tier; whatever happens it is gone at the end."""
    name = f"{tier}-{os.urandom(4).hex()}"
    script, shared = folder / f"{name}.py", folder / f"{name}.words"
    script.write_text(PRELUDE + body)
    shared.write_bytes(bytes(8 * _WORDS))
    environment = {
        **os.environ,
        "LD_PRELOAD": str(native.library),
        "LD_LIBRARY_PATH": str(native.folder / "plain"),
        "ECLIP_BOARD": str(folder / "board"),
        **({"ECLIP_TIER": tier} if tier else {}),
        **variables,
    }
    with shared.open("r+b") as file:
        words = np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.int64)
    child = subprocess.Popen(
        [sys.executable, str(script), str(shared)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Running(child, words)
    finally:
        child.kill()
        child.communicate()


def version_of(board: Path, version: int) -> None:
    """Say that the board is of this version."""
    with board.open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("=q", version))
