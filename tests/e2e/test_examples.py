"""The examples run as they stand, in a folder of their own, without a GPU."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import eclip
from waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))


def test_there_are_five_scripts_and_a_notebook() -> None:
    assert len(SCRIPTS) == 5
    listed = (ROOT / "examples" / "README.md").read_text()
    assert all(f"({path.name})" in listed for path in (*SCRIPTS, ROOT / "examples" / "tour.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script_runs(script: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(eclip.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and not done.stderr.strip()


@pytest.mark.slow
def test_notebook_runs_and_shows_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "examples" / "tour.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    shown = []
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        assert not cell["outputs"], "the notebook is kept without outputs"
        body = ast.parse(cell["source"]).body
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), "a cell", "exec"), names)
        if isinstance(last, ast.Expr):
            shown.append(eval(compile(ast.Expression(last.value), "a cell", "eval"), names))
    views = [value._repr_html_() for value in shown if hasattr(value, "_repr_html_")]
    assert len(views) >= 4 and all(view.startswith("<table>") for view in views)
    assert Path("report.html").exists() and Path("plan.json").exists()
