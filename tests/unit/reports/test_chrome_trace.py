"""The Chrome trace of a run log: its names, its times, its requests and its counter."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict

import msgspec
import pytest

from eclip.reports import chrome_trace
from logs import make_log, make_profile, without_records


def test_chrome_trace_names_processes_threads_and_kernels() -> None:
    log = make_log("eclip", workers=2)
    document = json.loads(gzip.decompress(chrome_trace.export(log, {})))
    assert document["otherData"]["policy"] == "eclip"
    assert document["otherData"]["mix"] == "2xalbert:8"
    assert document["otherData"]["device"] == "a simulated H200"
    assert document["otherData"]["modelled"] is True
    events = document["traceEvents"]
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"].get("name")
        for event in events
        if event["ph"] == "M"
    }
    assert names["process_name", 1, 0] == "albert.1 (albert:8)"
    assert names["thread_name", 2, 4] == "lane 3: 96 SMs, slices 0-11"
    kernels = [event for event in events if event["ph"] == "X"]
    assert len(kernels) == len(log.kernels.worker)
    assert kernels[0]["name"] == f"kernel {kernels[0]['args']['position']}"
    assert all(("thread_name", event["pid"], event["tid"]) in names for event in kernels)
    trace = make_profile().trace
    named = json.loads(gzip.decompress(chrome_trace.export(log, {trace.model: trace})))
    first = next(event for event in named["traceEvents"] if event["ph"] == "X")
    assert first["name"] == f"gemm<{first['args']['position']}>"


def test_chrome_trace_keeps_times_and_starts_at_zero() -> None:
    log = make_log("eclip")
    document = json.loads(gzip.decompress(chrome_trace.export(log, {})))
    events = [event for event in document["traceEvents"] if "ts" in event]
    assert min(event["ts"] for event in events) == 0
    origin = document["otherData"]["measured_from_us"]
    assert origin == 200.0
    first = next(event for event in events if event["ph"] == "X")
    assert first["ts"] == pytest.approx(log.kernels.start_ns[0] / 1e3 + origin)
    assert first["dur"] == pytest.approx((log.kernels.end_ns[0] - log.kernels.start_ns[0]) / 1e3)


def test_chrome_trace_requests_open_and_close_in_order() -> None:
    log = make_log("eclip", workers=1)
    waited = msgspec.structs.replace(
        log.requests, start_ns=tuple(arrival + 7_000 for arrival in log.requests.arrival_ns)
    )
    log = msgspec.structs.replace(log, requests=waited)
    document = json.loads(gzip.decompress(chrome_trace.export(log, {})))
    by_request = defaultdict(list)
    for event in document["traceEvents"]:
        if event.get("cat") == "request":
            by_request[event["id2"]["local"]].append((event["ph"], event["name"], event["ts"]))
    assert len(by_request) == len(log.requests.worker)
    for steps in by_request.values():
        assert [step[:2] for step in steps] == [
            ("b", "request"),
            ("b", "waiting"),
            ("e", "waiting"),
            ("b", "running"),
            ("e", "running"),
            ("e", "request"),
        ]
        assert [step[2] for step in steps] == sorted(step[2] for step in steps)
        assert steps[2][2] - steps[1][2] == pytest.approx(7.0)


def test_chrome_trace_leaves_out_requests_after_the_window_and_says_how_many() -> None:
    log = make_log("eclip")
    kernels = msgspec.structs.replace(log.kernels, window_ns=1_000_000)
    log = msgspec.structs.replace(log, kernels=kernels)
    document = json.loads(gzip.decompress(chrome_trace.export(log, {})))
    begun = [event for event in document["traceEvents"] if event.get("name") == "request"]
    early = sum(arrival < 1_000_000 for arrival in log.requests.arrival_ns)
    assert len(begun) == 2 * early
    assert document["otherData"]["requests_left_out"] == len(log.requests.worker) - early > 0


def test_chrome_trace_of_kernels_from_a_run_of_their_own_shows_no_other_runs_requests() -> None:
    log = make_log("eclip")
    kernels = msgspec.structs.replace(log.kernels, own_run=True)
    log = msgspec.structs.replace(log, kernels=kernels)
    document = json.loads(gzip.decompress(chrome_trace.export(log, {})))
    phases = [event["ph"] for event in document["traceEvents"]]
    assert phases.count("X") == len(log.kernels.worker)
    assert not {"b", "e"} & set(phases)
    assert document["otherData"]["kernels_from_a_run_of_their_own"] is True
    assert document["otherData"]["requests_left_out"] == len(log.requests.worker)


def test_chrome_trace_counts_occupied_slices_down_to_zero() -> None:
    log = make_log("eclip", workers=2)
    document = json.loads(gzip.decompress(chrome_trace.export(log, {})))
    counter = [event for event in document["traceEvents"] if event["ph"] == "C"]
    values = [event["args"]["count"] for event in counter]
    assert values[-1] == 0
    assert set(values) <= {0, 6, 12}  # 48 and 96 units from slice 0 on
    assert all(here != there for here, there in itertools.pairwise(values))


def test_chrome_trace_is_the_same_every_time_and_takes_an_empty_run() -> None:
    log = make_log("eclip")
    assert chrome_trace.export(log, {}) == chrome_trace.export(log, {})
    document = json.loads(gzip.decompress(chrome_trace.export(without_records(log), {})))
    assert {event["ph"] for event in document["traceEvents"]} == {"M"}
