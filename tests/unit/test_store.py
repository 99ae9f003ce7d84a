"""Artefact files: whole and valid, or refused in one line that names the file and the fault."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import signal
import stat
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eclip import store
from eclip.calibration import Calibration
from eclip.errors import ArtefactError, MismatchError, UsageError
from eclip.mix import mix_of
from eclip.plan import Plan
from eclip.planning.policies import make_plan
from eclip.planning.problem import Problem
from eclip.profile import Profile
from eclip.runlog import KernelRecords, Requests, RunLog, WorkerCounters
from eclip.store import Artefact
from eclip.topology import Topology
from eclip.trace import Kernel, Trace

TOPOLOGY = Topology(
    name="toy",
    title="Toy µ-GPU",
    unit_name="SM",
    compute="9.0",
    slice_units=(2, 2, 4),
    lane_sizes=(2, 4, 8),
    hardware_queues=16,
    source="by hand",
)
TRACE = Trace(
    model="m",
    batch=2,
    kernels=(
        Kernel(name='quote " and λ', grid=(3, 2, 1), block=(32, 1, 1), shared_bytes=9, cluster=2),
        Kernel(name="k", grid=(1, 1, 1), block=(1, 1, 1)),
    ),
    inputs=("2×3 float16",),
    libraries={"torch": "2"},
)
PROFILE = Profile(
    trace=TRACE,
    fingerprint=msgspec.structs.replace(TOPOLOGY.fingerprint, traces={TRACE.key: TRACE.digest}),
    modelled=True,
    source="by hand",
    sizes=(2, 4, 8),
    request_ns=(65, 35, 27),
    busy_ns=((40, 20, 15), (20, 10, 8)),
    gap_ns=((3, 3, 3), (2, 2, 1)),
    spread_ns=((1, 1, 1), (0, 0, 0)),
    dram_bytes=(100, 0),
    l2_bytes=(200, 50),
    blocks_per_unit=(2, 1),
)
CALIBRATION = msgspec.structs.replace(
    store.load_builtin(Calibration, "h200"), fingerprint=TOPOLOGY.fingerprint, source="by hand"
)
PLAN = make_plan("eclip", Problem(mix_of([("m", 2)] * 2), TOPOLOGY, (PROFILE, PROFILE)))
RUN = RunLog(
    plan=PLAN,
    device="toy",
    modelled=True,
    load="closed loop",
    seed=1,
    duration_ns=1000,
    energy_uj=7,
    requests=Requests(worker=(0, 1), arrival_ns=(-3, 0), start_ns=(-3, 1), end_ns=(5, 9)),
    kernels=KernelRecords(
        window_ns=10, worker=(0,), position=(1,), lane=(0,), start_ns=(-1,), end_ns=(5,)
    ),
    counters=(WorkerCounters(kernels=2, barriers=1, lane_waits=0, false_waits=0, false_wait_ns=0),)
    * 2,
    unfinished=(1, 0),
    alone_rps=(10.5, 1e-3),
    warnings=("careful",),
)
ARTEFACTS: dict[str, Artefact] = {
    "topology": TOPOLOGY,
    "trace": TRACE,
    "profile": PROFILE,
    "calibration": CALIBRATION,
    "plan": PLAN,
    "run": RUN,
}
SUFFIXES = (".json", ".json.gz")
every_kind = pytest.mark.parametrize("kind", ARTEFACTS)
every_suffix = pytest.mark.parametrize("suffix", SUFFIXES)


def saved(folder: Path, artefact: Artefact, suffix: str = ".json") -> Path:
    path = folder / f"artefact{suffix}"
    store.save(artefact, path)
    return path


def refusal(path: Path) -> str:
    """The one line that a damaged file is refused with."""
    with pytest.raises(ArtefactError) as caught:
        store.load_any(path)
    text = str(caught.value)
    assert str(path) in text
    assert "\n" not in text
    return text


def write(path: Path, kind: str, data: Any, **envelope: Any) -> Path:
    """A file as somebody may write it by hand: without a digest."""
    content = {"format": f"eclip/{kind}", "version": 1, "body": data} | envelope
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@every_kind
@every_suffix
def test_what_is_saved_is_loaded(tmp_path: Path, kind: str, suffix: str) -> None:
    artefact = ARTEFACTS[kind]
    path = saved(tmp_path, artefact, suffix)
    assert store.load_any(path) == artefact
    assert store.kind_at(path) == kind
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == (suffix == ".json.gz")


@every_suffix
def test_equal_artefacts_are_equal_bytes(tmp_path: Path, suffix: str) -> None:
    first = saved(tmp_path, PLAN, suffix).read_bytes()
    assert saved(tmp_path, PLAN, suffix).read_bytes() == first
    if suffix == ".json.gz":
        assert first[4:8] == bytes(4)  # no time of writing in the header


@every_kind
@every_suffix
def test_file_cut_at_any_byte_is_refused(tmp_path: Path, kind: str, suffix: str) -> None:
    whole = saved(tmp_path, ARTEFACTS[kind], suffix).read_bytes()
    cut = tmp_path / f"cut{suffix}"
    for length in range(len(whole)):
        cut.write_bytes(whole[:length])
        refusal(cut)


@every_kind
def test_file_without_digest_cut_at_any_byte_is_refused(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "whole.json", kind, store.to_data(ARTEFACTS[kind]))
    assert store.load_any(path) == ARTEFACTS[kind]
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        refusal(path)


@every_suffix
@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_changed_byte_is_refused_or_changes_nothing(
    tmp_path: Path, suffix: str, data: st.DataObject
) -> None:
    artefact = ARTEFACTS[data.draw(st.sampled_from(sorted(ARTEFACTS)))]
    path = tmp_path / f"{type(artefact).__name__}{suffix}"
    path.unlink(missing_ok=True)
    store.save(artefact, path)
    content = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        found = store.load_any(path)
    except ArtefactError as error:
        assert str(path) in str(error)
    else:
        assert found == artefact
    path.unlink()


@every_suffix
def test_anything_after_the_end_is_refused(tmp_path: Path, suffix: str) -> None:
    path = saved(tmp_path, PLAN, suffix)
    path.write_bytes(path.read_bytes() + path.read_bytes())
    refusal(path)


LEAVES: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, -1, 0, 1, 3, 10**9, 2**70, 0.5, -0.5, 1e300, "", "x", "0", "0-9999", [], {}, [[]]]
)


def paths_of(data: Any) -> list[tuple[Any, ...]]:
    children = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    return [()] + [(key, *path) for key, child in children for path in paths_of(child)]


def with_value(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = dict(data) if isinstance(data, dict) else list(data)
    copy[path[0]] = with_value(copy[path[0]], path[1:], value) if path[1:] else value
    return copy


@settings(
    max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_edited_file_is_refused_or_loads_and_saves_again(
    tmp_path: Path, data: st.DataObject
) -> None:
    kind = data.draw(st.sampled_from(sorted(ARTEFACTS)))
    content = json.loads(json.dumps(store.to_data(ARTEFACTS[kind])))
    path = data.draw(st.sampled_from(paths_of(content)))
    edited = write(tmp_path / "edited.json", kind, with_value(content, path, data.draw(LEAVES)))
    try:
        artefact = store.load_any(edited)
    except ArtefactError as error:
        assert str(edited) in str(error)
        return
    store.save(artefact, edited)
    assert store.load_any(edited) == artefact


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "not an eclip file"),
        (b"{}", "not an eclip file"),
        (b"[]", "not an eclip file"),
        (b"null", "not an eclip file"),
        (b'{"traceEvents": []}', "not an eclip file"),
        (b'{"format": "other/plan", "version": 1, "body": {}}', "other/plan"),
        (b'{"format": "eclip/tune", "version": 1, "body": {}}', "'tune'"),
        (b'{"format": "eclip/plan", "version": 2, "body": {}}', "version 2.*update eclip"),
        (b'{"format": "eclip/plan", "version": 0, "body": {}}', "version 0.*make the file again"),
        (b'{"format": "eclip/plan", "version": true, "body": {}}', "version"),
        (b'{"format": "eclip/plan", "version": 1}', "body"),
        (b'{"format": "eclip/plan", "version": 1, "body": {}}', "not a valid plan"),
        (b'{"format": "eclip/plan", "version": 1, "body": {"mix": "\xff"}}', "plan"),
        (b'{"format": "eclip/plan", "version": 1, "body": {"mix": "\\ud800"}}', "damaged"),
        (bytes(range(256)) * 40, "not an eclip file"),
        (b"\x1f\x8b" + bytes(range(256)), "damaged"),
        (b"\x89PNG\r\n\x1a\n", "not an eclip file"),
        ("﻿{}".encode("utf-16"), "not an eclip file"),
    ],
)
def test_foreign_file_is_refused(tmp_path: Path, content: bytes, fault: str) -> None:
    path = tmp_path / "foreign.json"
    path.write_bytes(content)
    assert re.search(fault, refusal(path))


@pytest.mark.parametrize("where", ["version", "body", "other"])
def test_number_or_nesting_beyond_all_bounds_is_refused(tmp_path: Path, where: str) -> None:
    parts = {"format": b'"eclip/plan"', "version": b"1", "body": b"{}", "other": b"{}"}
    parts[where] = b"9" * 5000 if where == "version" else b"[" * 100_000 + b"]" * 100_000
    path = tmp_path / "deep.json"
    path.write_bytes(
        b"{" + b",".join(b'"%b":%b' % (key.encode(), part) for key, part in parts.items()) + b"}"
    )
    refusal(path)


def test_envelope_with_a_field_that_save_never_writes_is_refused(tmp_path: Path) -> None:
    refusal(write(tmp_path / "a.json", "trace", store.to_data(TRACE), eigest="sha256:0"))


def test_missing_file_folder_and_file_used_as_a_folder_are_refused(tmp_path: Path) -> None:
    file = saved(tmp_path, TRACE)
    for path in (tmp_path / "none.json", tmp_path, file / "below.json", tmp_path / ("a" * 300)):
        assert "cannot read" in refusal(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_file_without_permission_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, TRACE)
    path.chmod(0)
    assert "cannot read" in refusal(path)
    tmp_path.chmod(0o500)
    with pytest.raises(ArtefactError, match="cannot write"):
        store.save(TRACE, tmp_path / "new.json")
    tmp_path.chmod(0o700)


@pytest.mark.parametrize("pack", [gzip.compress, bytes])
def test_file_that_unpacks_to_more_than_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setattr(store, "MAX_BYTES", 100_000)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(pack(b" " * 30_000_000))
    tracemalloc.start()
    assert "larger than" in refusal(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000


def test_file_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    path = saved(tmp_path, PROFILE)
    assert store.load(path, Profile) == PROFILE
    with pytest.raises(ArtefactError, match="holds a profile, but a plan is needed"):
        store.load(path, Plan)


def test_edit_is_noticed_unless_the_digest_is_removed(tmp_path: Path) -> None:
    path = saved(tmp_path, TRACE)
    content = json.loads(path.read_text(encoding="utf-8"))
    content["body"]["batch"] = 4
    path.write_text(json.dumps(content), encoding="utf-8")
    assert "digest" in refusal(path)
    del content["digest"]
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    assert store.load_any(path) == msgspec.structs.replace(TRACE, batch=4)


def test_unknown_built_in_lists_the_right_names() -> None:
    with pytest.raises(UsageError, match=r"h201.*a100, h100, h200, mi300x, mi50"):
        store.load_builtin(Topology, "h201")


def test_every_topology_has_a_calibration_that_is_for_it() -> None:
    assert store.builtin_names(Calibration) == store.builtin_names(Topology)
    for name in store.builtin_names(Topology):
        calibration = store.load_builtin(Calibration, name)
        topology = store.load_builtin(Topology, name)
        assert calibration.fingerprint.check(topology.fingerprint, "it", "that") == ()
        assert calibration.modelled


# --- Writing ----------------------------------------------------------------------------------

KILLED_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
from eclip import store
from eclip.topology import Topology

os.{call} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
store.save(store.load_builtin(Topology, "h200"), Path(sys.argv[1]))
"""


@pytest.mark.parametrize("call", ["fsync", "replace", "rename"])
def test_crash_while_writing_leaves_the_old_file(tmp_path: Path, call: str) -> None:
    path = saved(tmp_path, TOPOLOGY)
    script = KILLED_WHILE_WRITING.format(call=call)
    done = subprocess.run([sys.executable, "-c", script, str(path)], check=False, timeout=60)
    if call == "rename" and done.returncode == 0:
        assert store.load_any(path) == store.load_builtin(Topology, "h200")
        return
    assert done.returncode == -signal.SIGKILL
    assert store.load_any(path) == TOPOLOGY
    store.save(store.load_builtin(Topology, "mi50"), path)
    assert store.load_any(path) == store.load_builtin(Topology, "mi50")


@pytest.mark.parametrize("call", ["fsync", "replace", "chmod"])
@pytest.mark.parametrize("existing", [True, False])
def test_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, existing: bool
) -> None:
    path = saved(tmp_path, TOPOLOGY) if existing else tmp_path / "new.json"
    before = sorted(tmp_path.iterdir())

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(ArtefactError, match="No space left on device") as caught:
        store.save(store.load_builtin(Topology, "h200"), path)
    assert str(path) in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before
    assert not existing or store.load_any(path) == TOPOLOGY


def test_interrupted_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.save(TRACE, tmp_path / "new.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content", [b"", b"dear diary", b"{}", b'{"format": "other", "version": 1, "body": 1}']
)
def test_foreign_file_is_never_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "precious.json"
    path.write_bytes(content)
    with pytest.raises(ArtefactError, match="will not replace it"):
        store.save(PLAN, path)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("existing", [kind for kind in ARTEFACTS if kind != "plan"])
def test_artefact_of_another_kind_is_never_replaced(tmp_path: Path, existing: str) -> None:
    path = saved(tmp_path, ARTEFACTS[existing])
    with pytest.raises(ArtefactError, match=f"is {existing}, so a plan will not replace it"):
        store.save(PLAN, path)
    assert store.load_any(path) == ARTEFACTS[existing]


def test_artefact_of_the_same_kind_is_replaced_even_if_damaged_or_older(tmp_path: Path) -> None:
    path = write(tmp_path / "old.json", "plan", {"not": "a plan"}, version=0)
    store.save(PLAN, path)
    assert store.load_any(path) == PLAN


def test_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    file = saved(tmp_path, TRACE)
    for path in (tmp_path / "none" / "a.json", file / "a.json", tmp_path / ("a" * 300), tmp_path):
        with pytest.raises(ArtefactError) as caught:
            store.save(TRACE, path)
        assert str(path) in str(caught.value)


@every_suffix
def test_artefact_too_large_to_be_loaded_again_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(store, "MAX_BYTES", 1000)
    with pytest.raises(ArtefactError):
        store.save(RUN, tmp_path / f"new{suffix}")
    assert list(tmp_path.iterdir()) == []


def test_file_has_the_permissions_that_others_expect(tmp_path: Path) -> None:
    umask = os.umask(0o027)
    try:
        path = saved(tmp_path, TRACE)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(umask)


WRITE_OFTEN = """
import sys
from pathlib import Path
from eclip import store
from eclip.topology import Topology

topology = store.load_builtin(Topology, sys.argv[2])
for _ in range(150):
    store.save(topology, Path(sys.argv[1]))
"""


def test_two_writers_leave_one_whole_file_at_every_moment(tmp_path: Path) -> None:
    topologies = [store.load_builtin(Topology, name) for name in ("h200", "mi50")]
    path = saved(tmp_path, topologies[0])
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITE_OFTEN, str(path), topology.name])
        for topology in topologies
    ]
    reads = 0
    while any(writer.poll() is None for writer in writers):
        assert store.load_any(path) in topologies
        reads += 1
    assert [writer.returncode for writer in writers] == [0, 0]
    assert reads > 10
    assert list(tmp_path.iterdir()) == [path]


def test_export_replaces_only_what_carries_its_mark(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    store.save_export(path, b"<!-- mark --> one", b"<!-- mark -->")
    store.save_export(path, b"<!-- mark --> two", b"<!-- mark -->")
    assert path.read_bytes() == b"<!-- mark --> two"
    path.write_bytes(b"mine")
    with pytest.raises(ArtefactError, match="will not be replaced"):
        store.save_export(path, b"<!-- mark -->", b"<!-- mark -->")
    assert path.read_bytes() == b"mine"
    with pytest.raises(ArtefactError):
        store.save_export(tmp_path / ("a" * 300), b"", b"")


# --- What a valid artefact is -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "path", "value", "fault"),
    [
        ("trace", ("kernels",), [], "at least one kernel"),
        ("trace", ("batch",), 0, "batch"),
        ("trace", ("kernels", 0, "grid"), [0, 1, 1], "impossible launch shape"),
        ("trace", ("kernels", 0, "block"), [1, 1], "length 3"),
        ("trace", ("kernels", 0, "shared_bytes"), -1, "impossible launch shape"),
        ("trace", ("kernels", 0, "cluster"), 0, "impossible launch shape"),
        ("trace", ("kernels", 0, "typo"), 0, "typo"),
        ("profile", ("sizes",), [], "sizes must rise"),
        ("profile", ("sizes",), [4, 2, 8], "sizes must rise"),
        ("profile", ("sizes",), [0, 4, 8], "sizes must rise"),
        ("profile", ("sizes",), [2, 4, 6], "whole device, 8"),
        ("profile", ("request_ns",), [65, 35], "one entry per size"),
        ("profile", ("request_ns",), [65, 36, 27], "does not close at 4 units"),
        ("profile", ("busy_ns",), [[40, 20, 15]], "2 kernels × 3 sizes"),
        ("profile", ("busy_ns", 0), [40, 20], "2 kernels × 3 sizes"),
        ("profile", ("busy_ns", 0, 0), 41, "does not close at 2 units"),
        ("profile", ("busy_ns", 0, 0), 0, "at least 1 ns"),
        ("profile", ("gap_ns", 0, 0), -1, "negative time"),
        ("profile", ("spread_ns", 1, 2), -1, "negative time"),
        ("profile", ("dram_bytes",), [1], "dram_bytes"),
        ("profile", ("l2_bytes",), [1, -1], "l2_bytes"),
        ("profile", ("blocks_per_unit",), [1, 1, 1], "blocks_per_unit"),
        ("profile", ("energy_uj",), [1], "energy_uj"),
        ("profile", ("energy_uj",), [1, 1, -1], "energy_uj"),
        ("profile", ("illegal",), [[0, 2]], "kernel 0 at size 2"),
        ("profile", ("illegal",), [[2, 0]], "kernel 2 at size 0"),
        ("profile", ("illegal",), [[-1, 0]], "kernel -1 at size 0"),
        ("profile", ("fingerprint", "traces", "m:2"), "0", "trace"),
        ("profile", ("fingerprint", "slice_units"), [8, 8], "slice"),
        ("calibration", ("costs", "launch_ns"), -1, "launch_ns"),
        ("calibration", ("costs", "turn_ns"), 0, "turn_ns"),
        ("calibration", ("memory", "dram_bytes_per_s"), 0, "dram_bytes_per_s"),
        ("calibration", ("memory", "l2_bytes_per_s"), 0.0, "l2_bytes_per_s"),
        ("calibration", ("power", "idle_w"), -0.5, "idle_w"),
        ("calibration", ("power", "idle_w"), 10**400, "idle_w"),
        ("plan", ("workers",), [], "worker"),
        ("plan", ("variants",), [], "variant"),
        ("plan", ("mix", "workers"), [], "1 to 32 workers"),
        ("plan", ("mix", "workers", 1, "name"), "m.1", "one name"),
        ("plan", ("workers", 0, "name"), "other", "other"),
        ("plan", ("workers", 0, "model"), "other:2", "other:2"),
        ("plan", ("fingerprint", "units"), 9, "units"),
        ("plan", ("fingerprint", "slice_units"), [4, 4], "slices"),
        ("plan", ("fingerprint", "compute"), "8.0", "compute"),
        ("plan", ("lanes", 0, "owner"), 2, "does not exist"),
        ("plan", ("lanes", 0, "owner"), -2, "does not exist"),
        ("plan", ("lanes", 0, "owner"), 1, "lane 0 of another worker"),
        ("plan", ("lanes", 0, "mask"), "", "mask"),
        ("plan", ("lanes", 0, "mask"), "3", "does not have"),
        ("plan", ("lanes", 0, "mask"), 3, "mask"),
        ("plan", ("variants", 0, "active"), [0], "every worker"),
        ("plan", ("variants", 0, "active"), [1, 0], "every worker"),
        ("plan", ("variants", 0, "assignments"), [], "one assignment for each"),
        ("plan", ("variants", 0, "assignments", 1, "worker"), 0, "one assignment for each"),
        ("plan", ("variants", 0, "assignments", 0, "groups"), [], "do not cover"),
        ("plan", ("variants", 0, "assignments", 0, "groups", 0, "lane"), 99, "does not exist"),
        ("plan", ("variants", 0, "assignments", 0, "groups", 0, "lane"), -1, "does not exist"),
        ("plan", ("variants", 0, "assignments", 0, "groups", 0, "kernels"), 0, "empty group"),
        ("plan", ("variants", 0, "assignments", 0, "groups", 0, "kernels"), 9, "do not cover"),
        ("plan", ("workers", 0, "kernels"), 7, "do not cover"),
        ("run", ("counters",), [], "2 entries each"),
        ("run", ("unfinished",), [0], "2 entries each"),
        ("run", ("alone_rps",), [1.0], "2 entries each"),
        ("run", ("alone_rps",), [1.0, 0.0], "alone_rps"),
        ("run", ("duration_ns",), 0, "at least 1 ns"),
        ("run", ("energy_uj",), -1, "negative energy"),
        ("run", ("requests", "worker"), [0], "different lengths"),
        ("run", ("requests", "worker"), [0, 2], "does not exist"),
        ("run", ("requests", "end_ns"), [-9, 9], "request"),
        ("run", ("kernels", "worker"), [-1], "does not exist"),
        ("run", ("kernels", "lane"), [], "different lengths"),
        ("run", ("kernels", "lane"), [99], "lane"),
        ("run", ("kernels", "position"), [2], "kernel"),
    ],
)
def test_invalid_artefact_is_refused_with_the_fault(
    tmp_path: Path, kind: str, path: tuple[Any, ...], value: Any, fault: str
) -> None:
    content = with_value(store.to_data(ARTEFACTS[kind]), path, value)
    assert fault in refusal(write(tmp_path / "bad.json", kind, content))


def test_two_groups_in_a_row_on_one_lane_are_refused(tmp_path: Path) -> None:
    content = store.to_data(PLAN)
    group = content["variants"][0]["assignments"][0]["groups"][0]
    content["variants"][0]["assignments"][0]["groups"] = [{**group, "kernels": 1}] * 2
    assert "two in a row" in refusal(write(tmp_path / "bad.json", "plan", content))


def test_variants_with_one_key_or_an_unknown_worker_are_refused(tmp_path: Path) -> None:
    content = store.to_data(PLAN)
    main = content["variants"][0]
    twice = {**content, "variants": [main, main]}
    assert "same workers" in refusal(write(tmp_path / "bad.json", "plan", twice))
    solo = {"active": [2], "assignments": [{**main["assignments"][0], "worker": 2}]}
    unknown = {**content, "variants": [main, solo]}
    assert "not rising worker indices" in refusal(write(tmp_path / "bad.json", "plan", unknown))


# --- What artefacts were made for -------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"units": 12, "slice_units": (6, 6)}, "units 8 against 12"),
        ({"slice_units": (4, 4)}, "slices (2, 2, 4) against (4, 4)"),
        ({"compute": "8.0"}, "compute capability 9.0 against 8.0"),
        ({"traces": {"m:2": "0" * 64}}, "different kernels for m:2"),
    ],
)
def test_hard_part_of_a_fingerprint_must_match(changes: dict[str, Any], fault: str) -> None:
    other = msgspec.structs.replace(PROFILE.fingerprint, **changes)
    with pytest.raises(MismatchError) as caught:
        PROFILE.fingerprint.check(other, "the profile", "the plan")
    assert fault in str(caught.value)
    assert "make the profile again" in str(caught.value)


def test_soft_part_of_a_fingerprint_may_differ_with_a_warning() -> None:
    mine = msgspec.structs.replace(
        PROFILE.fingerprint, driver="1", device="A", libraries={"torch": "2.0", "cudnn": "9"}
    )
    same = mine.check(mine, "it", "that")
    other = msgspec.structs.replace(
        mine, driver="2", device="B", libraries={"torch": "2.1", "numpy": "2"}
    )
    found = mine.check(other, "the profile", "the plan")
    assert same == ()
    assert [warning.split(" with ")[1].split(" ")[0] for warning in found] == [
        "driver",
        "device",
        "torch",
    ]
    assert all("the profile" in warning and "the plan" in warning for warning in found)


def test_what_only_one_side_knows_is_not_compared() -> None:
    stranger = msgspec.structs.replace(TOPOLOGY.fingerprint, traces={"other:1": "1"}, device="")
    assert PROFILE.fingerprint.check(stranger, "it", "that") == ()
