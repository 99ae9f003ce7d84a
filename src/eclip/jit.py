"""The one place that meets numba: compiled functions keep their types for mypy.

Compiled code holds no GIL and is cached on disk, so only the first run of a fresh checkout compiles.
"""

from collections.abc import Callable
from typing import TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    return cast(F, numba.njit(cache=True, nogil=True, error_model="numpy")(function))
