"""Artefact files are read whole and valid, or refused in one line that names file and fault."""

from __future__ import annotations

import gzip
import json
import os
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from artefacts import (
    ARTEFACTS,
    PLAN,
    PROFILE,
    TRACE,
    every_kind,
    every_suffix,
    refusal,
    saved,
    with_value,
    write,
)
from eclip.core.calibration import Calibration
from eclip.core.model_key import ModelKey
from eclip.core.plan import Plan
from eclip.core.profile import Profile
from eclip.core.topology import Topology
from eclip.errors import ArtefactError, UsageError
from eclip.files import store


@every_kind
@every_suffix
def test_what_is_saved_is_loaded(tmp_path: Path, kind: str, suffix: str) -> None:
    artefact = ARTEFACTS[kind]
    path = saved(tmp_path, artefact, suffix)
    assert store.load(path) == artefact
    assert store.kind_at(path) == kind
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == (suffix == ".json.gz")


@every_suffix
def test_equal_artefacts_are_equal_bytes(tmp_path: Path, suffix: str) -> None:
    first = saved(tmp_path, PLAN, suffix).read_bytes()
    assert saved(tmp_path, PLAN, suffix).read_bytes() == first
    if suffix == ".json.gz":
        assert first[4:8] == bytes(4)  # no time of writing in the header


@pytest.mark.slow
@every_kind
@every_suffix
def test_file_cut_at_any_byte_is_refused(tmp_path: Path, kind: str, suffix: str) -> None:
    whole = saved(tmp_path, ARTEFACTS[kind], suffix).read_bytes()
    cut = tmp_path / f"cut{suffix}"
    for length in range(len(whole)):
        cut.write_bytes(whole[:length])
        refusal(cut)


@pytest.mark.slow
@every_kind
def test_file_without_digest_cut_at_any_byte_is_refused(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "whole.json", kind, store.to_data(ARTEFACTS[kind]))
    assert store.load(path) == ARTEFACTS[kind]
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        refusal(path)


@pytest.mark.slow
@every_suffix
@settings(
    max_examples=400,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
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
        found = store.load(path)
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


@settings(
    max_examples=600,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
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
        artefact = store.load(edited)
    except ArtefactError as error:
        assert str(edited) in str(error)
        return
    store.save(artefact, edited)
    assert store.load(edited) == artefact


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
        (b'{"format": "eclip/plan", "version": 3, "body": {}}', "version 3.*update eclip"),
        (b'{"format": "eclip/plan", "version": 0, "body": {}}', "version 0.*make the file again"),
        (b'{"format": "eclip/plan", "version": true, "body": {}}', "version"),
        (b'{"format": "eclip/plan", "version": 2}', "body"),
        (b'{"format": "eclip/plan", "version": 2, "body": {}}', "not a valid plan"),
        (b'{"format": "eclip/plan", "version": 2, "body": {"mix": "\xff"}}', "plan"),
        (b'{"format": "eclip/plan", "version": 2, "body": {"mix": "\\ud800"}}', "damaged"),
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


@pytest.mark.parametrize("kind", store._KINDS)
def test_older_file_is_refused_with_the_command_that_makes_it_anew(
    tmp_path: Path, kind: str
) -> None:
    path = write(tmp_path / "old.json", kind, {}, version=store._KINDS[kind][1] - 1)
    assert re.search(
        f"this eclip reads {store._KINDS[kind][1]}; .*: .*(eclip|by hand)", refusal(path)
    )


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
    content["body"]["model"]["batch"] = 4
    path.write_text(json.dumps(content), encoding="utf-8")
    assert "digest" in refusal(path)
    del content["digest"]
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    assert store.load(path) == msgspec.structs.replace(TRACE, model=ModelKey("m", 4))


def test_unknown_built_in_lists_the_right_names() -> None:
    with pytest.raises(UsageError, match=r"h201.*a100, h100, h200, mi300x, mi50"):
        store.load_builtin("h201", Topology)


def test_every_topology_has_a_calibration_that_is_for_it() -> None:
    assert store.builtin_names(Calibration) == store.builtin_names(Topology)
    for name in store.builtin_names(Topology):
        calibration = store.load_builtin(name, Calibration)
        topology = store.load_builtin(name, Topology)
        assert calibration.fingerprint.check(topology.fingerprint, "it", "that") == ()
        assert calibration.modelled
