"""What the programs beside this one made, as one line that can be compared."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any

import numpy as np

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def tell(*found: Any) -> None:
    """Arrays of any library."""
    made = hashlib.sha256()
    for one in found:
        array = np.ascontiguousarray(one.detach().cpu() if hasattr(one, "detach") else one)
        if not np.isfinite(np.asarray(array, dtype=float)).all():
            sys.exit("its outputs are not finite")
        made.update(array.tobytes())
    sys.stdout.write(json.dumps({"digest": made.hexdigest()[:16]}) + "\n")
