"""The one place that meets numba: compiled functions keep their types for mypy.

Compiled code holds no GIL and is cached on disk: only the first run of a checkout compiles.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    return cast(F, _compile(function))


def compiled_with(*files: str) -> Callable[[F], F]:
    """Like ``compiled``, for a function that calls compiled functions of these other files.

    Numba's cache looks only at a function's own file, and would go on using what it compiled with
    the old content of the others.
    """

    def decorate(function: F) -> F:
        dispatcher = _compile(function)
        digest = hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()
        index = dispatcher._cache._cache_file
        index._source_stamp = (index._source_stamp, digest)
        return cast(F, dispatcher)

    return decorate


def inlined(function: F) -> F:
    """A part of a compiled function, written apart for the reader.

    Called the ordinary way, a helper that takes a dozen arrays spends more time counting references
    to them than working.
    """
    return cast(F, numba.njit(inline="always", error_model="numpy")(function))


def _compile(function: Callable[..., object]) -> Any:
    # Reassociation lets sums use vector instructions; NaN and infinity keep their meaning.
    return numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "nsz"})(
        function
    )
