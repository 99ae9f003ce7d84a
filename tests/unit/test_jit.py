"""Compiled code runs wherever it is installed, and is cached only where nobody else can write."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eclip import jit
from waiting import PATIENCE_S

# What is imported from a folder that cannot be written, like a package that root installed.
MODULE = """
from eclip.jit import compiled, compiled_with

@compiled
def double(x):
    return 2 * x

@compiled_with(__file__)
def quadruple(x):
    return double(double(x))
"""

# Its argument: the temporary directory.
SCRIPT = """
import json, sys, tempfile
tempfile.tempdir = sys.argv[1]
from module import double, quadruple
assert (double(3), quadruple(3)) == (6, 12)
stats = [double.stats, quadruple.stats]
print(json.dumps({
    "folders": sorted({one.cache_path for one in stats}, key=str),
    "hits": sum(sum(one.cache_hits.values()) for one in stats),
}))
"""

# Executes its arguments as a program for which permissions count, even if root started it:
# PR_CAPBSET_DROP of CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH. Others may not, nor need to.
OBEYING = """
import ctypes, os, sys
for capability in (1, 2):
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""

Run = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """The script where neither the module's folder nor the home folder can be written."""
    package, home, work = (tmp_path / name for name in ("package", "home", "work"))
    for folder in (package, home, work):
        folder.mkdir()
    (package / "module.py").write_text(MODULE)
    for folder in (package, home):
        folder.chmod(0o555)
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("NUMBA_", "XDG_", "PYTHONPYCACHEPREFIX"))
    }
    environment |= {
        "HOME": str(home),
        "PYTHONPATH": os.pathsep.join([str(package), *filter(None, sys.path)]),
    }

    def child(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", OBEYING, sys.executable, "-c", code, *map(str, arguments)],
            cwd=work,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    refused = child("from pathlib import Path; Path(__import__('sys').argv[1], 'x').touch()", home)
    if refused.returncode == 0:
        pytest.skip("this process may not give up its right to write everywhere")

    def call(temporary: Path) -> Any:
        done = child(SCRIPT, temporary)
        assert done.returncode == 0, done.stderr
        assert list(work.iterdir()) == []
        return json.loads(done.stdout)

    yield call
    for folder in (package, home):
        folder.chmod(0o755)


@pytest.mark.slow
def test_without_another_place_code_is_kept_in_a_private_folder(run: Run, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    first = run(temporary)
    mine = temporary / f"eclip-{os.geteuid()}"
    assert all(Path(folder).parent == mine for folder in first["folders"])
    assert mine.stat().st_mode & 0o777 == 0o700
    assert first["hits"] == 0
    assert run(temporary) == {"folders": first["folders"], "hits": 2}


@pytest.mark.slow
def test_without_any_place_code_is_compiled_and_not_kept(run: Run, tmp_path: Path) -> None:
    assert run(tmp_path / "home") == {"folders": [None], "hits": 0}
    assert run(tmp_path / "nowhere") == {"folders": [None], "hits": 0}
    # What Python falls back to is the user's own folder, which is not ours to fill.
    assert run(tmp_path / "work") == {"folders": [None], "hits": 0}


@pytest.mark.parametrize("trap", ["open to the group", "a link", "a file", "somebody else's"])
def test_a_folder_that_others_can_write_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert jit._private_folder() == tmp_path / f"eclip-{os.geteuid()}"
    mine = tmp_path / f"eclip-{os.geteuid()}"
    if trap == "open to the group":
        mine.chmod(0o770)
    elif trap == "somebody else's":
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        (tmp_path / "eclip-12345").mkdir(mode=0o700)
    else:
        mine.rename(tmp_path / "elsewhere")
        if trap == "a file":
            mine.touch(mode=0o600)
        else:
            mine.symlink_to(tmp_path / "elsewhere")
    assert jit._private_folder() is None


def test_where_numba_has_a_place_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))

    def triple(x: int) -> int:
        return 3 * x

    made: Any = jit.compiled(triple)
    assert made(2) == 6
    assert Path(made.stats.cache_path).parent == tmp_path
    assert list(tmp_path.rglob("*.nbi"))


def test_a_disk_that_has_become_full_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))

    def triple(x: int) -> int:
        return 3 * x

    made: Any = jit.compiled(triple)
    asked = []

    def full(*_: object) -> None:
        asked.append(True)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(made._cache._cache_file, "save", full)
    assert made(2) == 6
    assert asked


def test_cache_of_an_older_version_is_made_anew(tmp_path: Path) -> None:
    """Such a cache names classes that are gone; numba would end with an AttributeError."""
    (tmp_path / "module.py").write_text(MODULE)
    command = [sys.executable, "-c", "from module import double; print(double(3))"]
    folder = str(Path(jit.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(tmp_path)])}
    environment["NUMBA_CACHE_DIR"] = str(tmp_path / "cache")

    def double() -> str:
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=True
        ).stdout.strip()

    assert double() == "6"
    (index,) = (tmp_path / "cache").rglob("*double*.nbi")
    whole = index.read_bytes()
    version = whole[: whole.index(b"\x80")]  # numba's own comes before the pickled rest
    index.write_bytes(version + b"\x80\x04cmodule\nGone\n.")
    assert double() == "6"
    assert index.read_bytes() != version + b"\x80\x04cmodule\nGone\n."


# Its argument is the folder of what is shipped.
SHIPPED_SCRIPT = """
import sys
from pathlib import Path
from eclip import jit
jit.SHIPPED = Path(sys.argv[1])
from module import quadruple
assert quadruple(3) == 12
print(jit.compiling_s() > 0)
"""


@pytest.mark.slow
def test_what_is_shipped_is_not_compiled_again(tmp_path: Path) -> None:
    shipped, module = tmp_path / "shipped", tmp_path / "module.py"
    module.write_text(MODULE)
    shipped.mkdir()

    def compiles(cache: str, **more: str) -> bool:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)]),
            "NUMBA_CACHE_DIR": str(tmp_path / cache),
        }
        done = subprocess.run(
            [sys.executable, "-c", SHIPPED_SCRIPT, str(shipped)],
            env=environment | more,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip() == "True"

    assert compiles("first", **jit.EVERY_PROCESSOR, **{jit.FILL: str(shipped)})
    assert len(list(shipped.glob("module.*.nbc"))) == 2
    assert not compiles("second")  # whose cache is empty
    module.write_text(MODULE.replace("2 * x", "x + x"))
    assert compiles("third")  # of other sources
    module.write_text(MODULE)
    for file in shipped.iterdir():
        file.write_bytes(b"damaged")
    assert compiles("fourth")
