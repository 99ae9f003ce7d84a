"""The one place that meets numba: compiled functions keep their types for mypy.

Compiled code holds no GIL and is cached on disk, so only the first run of a fresh checkout
compiles.
"""

from collections.abc import Callable
from typing import TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    # Reassociation lets sums use vector instructions; NaN and infinity keep their meaning.
    decorate = numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "nsz"})
    return cast(F, decorate(function))


def inlined(function: F) -> F:
    """A part of a compiled function, written apart for the reader.

    Called the ordinary way, a helper that takes two dozen arrays spends more time counting
    references to them than working.
    """
    return cast(F, numba.njit(inline="always", error_model="numpy")(function))
