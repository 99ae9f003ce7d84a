"""What a valid artefact is: every rule, broken by hand in a file, is refused with the fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from artefacts import ARTEFACTS, PLAN, refusal, with_value, write
from eclip.files import store

COPY = {"before": 1, "to_device": True, "bytes": 1, "ns": 0}
M_66 = {"name": "m", "batch": 2, "kernels_for": 66}


@pytest.mark.parametrize(
    ("kind", "path", "value", "fault"),
    [
        ("trace", ("kernels",), [], "at least one kernel"),
        ("trace", ("model", "batch"), 0, "the batch of m must be 1 to 65536, not 0"),
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
        ("profile", ("request_ns",), [65, 36, 27], "times do not add up at 4 units"),
        ("profile", ("busy_ns",), [[40, 20, 15]], "2 kernels × 3 sizes"),
        ("profile", ("busy_ns", 0), [40, 20], "2 kernels × 3 sizes"),
        ("profile", ("busy_ns", 0, 0), 41, "times do not add up at 2 units"),
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
        ("profile", ("copies",), [COPY | {"before": 3}], "one of 2 kernels or behind the last"),
        ("profile", ("copies",), [COPY | {"before": -1}], "comes before a kernel"),
        ("profile", ("copies",), [COPY | {"bytes": 0}], "at least 1 byte"),
        ("profile", ("copies",), [COPY | {"ns": 1_000}], "longer than the gap"),
        ("profile", ("fingerprint", "traces", "m:2"), "0", "trace"),
        ("profile", ("fingerprint", "slice_units"), [8, 8], "slice"),
        ("calibration", ("costs", "launch_ns"), -1, "launch_ns"),
        ("calibration", ("costs", "turn_ns"), 0, "turn_ns"),
        ("calibration", ("memory", "dram_bytes_per_s"), 0, "dram_bytes_per_s"),
        ("calibration", ("memory", "l2_bytes_per_s"), 0.0, "l2_bytes_per_s"),
        ("calibration", ("power", "idle_w"), -0.5, "idle_w"),
        ("calibration", ("power", "idle_w"), 10**400, "a whole number"),
        ("calibration", ("interference", "cohabit"), 1.5, "at most 1"),
        ("calibration", ("interference", "pressure"), -0.1, "pressure"),
        ("observations", ("date",), "yesterday", "date"),
        ("observations", ("fingerprint", "traces"), {}, "trace of m:2"),
        ("observations", ("fingerprint", "slice_units"), [4, 4], "2 slices"),
        ("observations", ("runs", 0, "mix"), "2xm:", "cannot read"),
        ("observations", ("runs", 0, "mix"), "3xm:2", "3 workers"),
        ("observations", ("runs", 0, "homes"), [{"first": 0, "step": 1, "most": 1}], "homes"),
        ("observations", ("runs", 0, "homes", 0, "first"), 3, "3 slices"),
        ("observations", ("runs", 0, "homes", 0, "first"), -1, "first slice"),
        ("observations", ("runs", 0, "homes", 0, "step"), 2, "step"),
        ("observations", ("runs", 0, "homes", 0, "most"), 4, "3 slices"),
        ("observations", ("runs", 0, "homes", 0, "most"), 0, "at least 1 slice"),
        ("observations", ("runs", 0, "homes", 1, "price"), -1, "price"),
        ("observations", ("runs", 0, "homes", 1, "switch_max"), -1, "switches"),
        ("observations", ("runs", 0, "homes", 1, "kernels_for"), -1, "kernels"),
        ("observations", ("runs", 0, "routes"), [[[1, 2]]], "as many routes"),
        ("observations", ("runs", 0, "routes", 0), [], "at least 1 kernel"),
        ("observations", ("runs", 0, "routes", 1, 0), [3, 0], "at least 1 kernel"),
        ("observations", ("runs", 0, "routes", 1, 0), [4, 1], "3 slices"),
        ("observations", ("runs", 0, "rates_rps"), [1.0], "as many rates"),
        ("observations", ("runs", 0, "rates_rps"), [1.0, 0.0], "above 0"),
        ("observations", ("runs", 0, "power_w"), 0.0, "above 0"),
        ("observations", ("runs", 1, "seconds"), -1, "above 0"),
        ("plan", ("workers",), [], "worker"),
        ("plan", ("variants",), [], "variant"),
        ("plan", ("mix", "workers"), [], "1 to 32 workers"),
        ("plan", ("mix", "workers", 1, "name"), "m.1", "one name"),
        ("plan", ("mix", "workers", 0, "model"), "m:2", "Expected `object`"),
        ("plan", ("mix", "workers", 0, "model", "name"), "m~x", "'m~x' is not a model's name"),
        ("plan", ("mix", "workers", 0, "model", "batch"), 0, "must be 1 to 65536"),
        ("plan", ("mix", "workers", 0, "model"), M_66, "m~66:2"),
        ("plan", ("workers", 0, "name"), "other", "other"),
        ("plan", ("workers", 0, "model", "name"), "other", "other:2"),
        ("plan", ("sharing",), {"type": "magic"}, "magic"),
        ("plan", ("sharing",), {"type": "processes", "shares": [50]}, "1 shares given for 2"),
        ("plan", ("sharing",), {"type": "processes", "shares": [0, 9]}, "1 to 100 percent"),
        ("plan", ("sharing",), {"type": "turns", "shares": [50, 50]}, "unknown field"),
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
        ("run", ("alone_rps",), [1.0], "alone_rps needs 2 entries, or none"),
        ("run", ("lag_ns",), [0], "2 entries each"),
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
