"""What goes wrong around libeclip ends in an unplanned process that works, or in one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eclip.core.topology import Topology
from eclip.programs.table import WorkersBy, record_table
from native_build import Native

FULL = "ffff"


@pytest.fixture(scope="module")
def table(h200: Topology, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every launch to a lane of 64 units: whoever gets the lane shows it."""
    path = tmp_path_factory.mktemp("table") / "table"
    path.write_bytes(record_table(h200, 64, WorkersBy.STREAM))
    return path


def serve(native: Native, table: Path, *words: object, **variables: str) -> tuple[list[str], str]:
    done = native.run("plain/probe", *words, preload=True, ECLIP_TABLE=str(table), **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def masks(line: str) -> set[str]:
    return set(line.split()[1:])


def assert_one_line(errors: str, *words: str) -> None:
    lines = errors.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("eclip: ")
    for word in words:
        assert word in lines[0]


def test_with_a_good_table_launches_are_redirected(native: Native, table: Path) -> None:
    lines, errors = serve(native, table, "serve")
    assert masks(lines[0]) == {"ff"}
    assert errors == ""


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "not an eclip table"),
        (b"not a table", "not an eclip table"),
        (b"ECLIPTBL" + bytes(60), "another version"),
    ],
)
def test_a_damaged_table_leaves_the_process_unplanned(
    native: Native, tmp_path: Path, content: bytes, word: str
) -> None:
    (tmp_path / "table").write_bytes(content)
    lines, errors = serve(native, tmp_path / "table", "serve")
    assert masks(lines[0]) == {FULL}
    assert_one_line(errors, word, "running unplanned")


@settings(
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_no_change_of_a_table_goes_unnoticed(
    native: Native, table: Path, tmp_path: Path, data: st.DataObject
) -> None:
    content = bytearray(table.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= data.draw(st.integers(1, 255))
    (tmp_path / "table").write_bytes(content)
    lines, errors = serve(native, tmp_path / "table", "serve", "--requests", 1)
    assert masks(lines[0]) == {FULL}
    assert_one_line(errors, "running unplanned")


def test_a_missing_table_is_named(native: Native, tmp_path: Path) -> None:
    lines, errors = serve(native, tmp_path / "nothing", "serve")
    assert masks(lines[0]) == {FULL}
    assert_one_line(errors, "nothing", "No such file")


def test_an_older_driver_leaves_the_process_unplanned(native: Native, table: Path) -> None:
    old = str(native.folder / "old")
    lines, errors = serve(native, table, "serve", LD_LIBRARY_PATH=old)
    assert masks(lines[0]) == {FULL}
    assert_one_line(errors, "cuDeviceGetDevResource", "CUDA 12.4")


def test_another_device_leaves_the_process_unplanned(native: Native, table: Path) -> None:
    lines, errors = serve(native, table, "serve", STANDIN_UNITS="64")
    assert masks(lines[0]) == {FULL}
    assert_one_line(errors, "16 slices", "plan for this device")


def test_a_forked_child_is_left_alone(native: Native, table: Path) -> None:
    lines, errors = serve(native, table, "fork")
    assert lines[1] == "child 7"
    assert masks(lines[0]) == masks(lines[2]) == {"ff"}
    assert errors == ""


def test_a_child_of_a_parent_that_used_no_device_is_planned(native: Native, table: Path) -> None:
    lines, errors = serve(native, table, "prefork")
    assert masks(lines[0]) == {"ff"}
    assert errors == ""


def test_a_process_that_executes_another_is_planned_there(native: Native, table: Path) -> None:
    lines, _ = serve(native, table, "exec")
    assert masks(lines[0]) == {"ff"}


def test_a_second_process_is_refused_with_the_reason(native: Native, table: Path) -> None:
    lines, errors = serve(native, table, "many")
    assert masks(lines[0]) == {"ff"}
    assert masks(lines[1]) == {FULL}
    assert_one_line(errors, "another process", "running unplanned")


def test_a_thread_that_ends_in_a_capture_harms_nobody(native: Native, table: Path) -> None:
    lines, errors = serve(native, table, "orphan")
    assert masks(lines[0]) == masks(lines[1]) == {"ff"}
    assert errors == ""


def test_disable_turns_everything_off(native: Native, table: Path) -> None:
    lines, errors = serve(native, table, "serve", ECLIP_DISABLE="1")
    assert masks(lines[0]) == {FULL}
    assert errors == ""
