"""lab/gpu/services.py, rehearsed on the simulator: its mistakes must not cost a GPU time."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eclip.core.model_key import parse_model

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "lab" / "gpu" / "services.py"


def constants() -> Any:
    """The script's tables, without running it as a script."""
    code = (
        f"import sys, json; sys.path.insert(0, {str(ROOT)!r})\n"
        "from lab.support import pairs as s\n"
        "print(json.dumps([{n: p.models for n, p in s.PAIRS.items()}, s.STAND_INS]))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(said.stdout)


def test_every_workload_exists_and_has_a_stand_in() -> None:
    pairs, stand_ins = constants()
    tree = ast.parse((ROOT / "lab" / "gpu" / "workloads.py").read_text())
    factories = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    own = {model for models in pairs.values() for model in models if ":" in parse_model(model).name}
    assert len(pairs) >= 12
    assert {parse_model(model).name.partition(":")[2] for model in own} <= factories
    assert own == set(stand_ins)


@pytest.mark.slow
def test_a_rehearsal_writes_a_line_for_every_way(tmp_path: Path) -> None:
    ways = ["priorities", "yield d1", "yield d2", "move half", "masks 50", "time-sliced", "MPS 50"]
    ways += ["yield MPS", "bound 2.5"]
    said = subprocess.run(
        [
            *(sys.executable, SCRIPT, tmp_path, "--device", "sim", "--again"),
            *("--pairs", "bert+vgg", "--requests", "150", "--ways", ",".join(ways)),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert said.returncode == 0, said.stderr
    rows = [json.loads(line) for line in (tmp_path / "services.jsonl").read_text().splitlines()]
    found = {row["way"]: row for row in rows}
    alone = ["alone in yield d2", "alone in time-sliced", "alone in yield MPS"]
    assert list(found) == [*alone, "alone again", *ways]
    assert found["alone in time-sliced"]["alone"][0]["late"]["max_ms"] == 0
    (again,) = found["alone again"]["services"]
    assert again["excess"] == {"p50_ms": 0, "p99_ms": 0, "max_ms": 0}  # it repeats itself exactly
    for way in ("yield d1", "yield d2"):
        (service,) = found[way]["services"]
        assert service["checks"]["excess"] and service["p99_ratio"]["value"] < 1.2
        assert found[way]["yields"] > 0
        assert 0.9 < found[way]["background_over_rest"] < 1.1
    assert found["move half"]["moves"] > 0
    assert found["masks 50"]["background"] < 0.8
    assert found["bound 2.5"]["background"] > found["yield d2"]["background"]
    with np.load(tmp_path / "latencies" / "bert-vgg-0.35-poisson-1.npz") as kept:
        assert len(kept["arrivals_0"]) == len(kept["yield_d2_0"]) == len(kept["alone_0"])
    assert "Over all pairs" in said.stdout
