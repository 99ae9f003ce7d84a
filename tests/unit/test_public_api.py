"""The public API is what ``eclip.__all__`` says, and all of it is there."""

from __future__ import annotations

import eclip


def test_every_public_name_exists_and_is_sorted() -> None:
    assert all(hasattr(eclip, name) for name in eclip.__all__)
    assert list(eclip.__all__) == sorted(eclip.__all__)


def test_importing_eclip_does_not_load_the_heavy_rooms() -> None:
    import subprocess
    import sys

    script = (
        "import sys, eclip; print([m for m in ('numba', 'plotly', 'highspy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
