"""Kernel names for people: demangled, without arguments, and short enough for one line."""

from __future__ import annotations

import ctypes
import functools
import re

from eclip.core.trace import Trace

_MOST = 90  # letters: a longer line would be as wide as the page
_NOISE = re.compile(r"\(anonymous namespace\)::|^void |\bat::native::|\bstd::")


def kernel_names(trace: Trace) -> list[str]:
    return [readable(kernel.name) for kernel in trace.kernels]


@functools.lru_cache(maxsize=4096)
def readable(name: str) -> str:
    """``vectorized_elementwise_kernel<8, CUDAFunctor_add<c10::Half>, array<char*, 3ul>>``"""
    text = _NOISE.sub("", _without_arguments(demangled(name)))
    return text if len(text) <= _MOST else text[: _MOST - 1] + "…"


def demangled(name: str) -> str:
    """As the C++ runtime reads it; a name that is none of C++'s stays as it is."""
    if not name.startswith("_Z") or (demangle := _demangler()) is None:
        return name
    status = ctypes.c_int()
    text = demangle(name.encode(), None, None, ctypes.byref(status))
    if not text:
        return name
    try:
        return (ctypes.string_at(text)).decode(errors="replace")
    finally:
        _free(text)


def _without_arguments(text: str) -> str:
    """The text before its arguments: before the last parenthesis that is not nested."""
    depth = 0
    for index in range(len(text) - 1, -1, -1):
        depth += {")": 1, ">": 1, "(": -1, "<": -1}.get(text[index], 0)
        if text[index] == "(" and depth == 0 and text.endswith(")") and index:
            return text[:index]
    return text


@functools.cache
def _demangler() -> ctypes._NamedFuncPointer | None:
    """The C++ runtime's own; NumPy needs that library, too."""
    try:
        demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    except (OSError, AttributeError):
        return None
    demangle.restype = ctypes.c_void_p
    return demangle


def _free(address: int) -> None:
    release = ctypes.CDLL(None).free
    release.argtypes = [ctypes.c_void_p]
    release(address)
