"""Prometheus text, read back by Prometheus' own parser."""

from __future__ import annotations

from http.client import HTTPConnection

import numpy as np
import tritonclient.http
from prometheus_client.parser import text_string_to_metric_families

from eclip.server.messages import (
    BUCKETS_S,
    Counters,
    DeviceCounters,
    Durations,
    Phase,
    ProcessCounters,
    Reason,
    ServiceCounters,
    Statistics,
)
from eclip.server.protocol.metrics import Metrics
from numpy_core import NumpyCore
from numpy_server import NumpyServer

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Counted(NumpyCore):
    def counters(self) -> Counters:
        buckets = [0] * (len(BUCKETS_S) + 1)
        buckets[0], buckets[4], buckets[-1] = 3, 2, 1
        service = ServiceCounters(
            Statistics(success=Phase(5, 7_000_000), queue=Phase(5, 1500), inferences=9),
            latency=Durations(buckets, 12.5),
            refused={Reason.OVERLOADED: 4},
            bound_s=0.005,
            late=2,
            yields=17,
            run_again=3,
        )
        process = {"front 0": ProcessCounters(1.5, 4096, 12)}
        return Counters(
            {"pairs": service}, {"gpu0": DeviceCounters(0.25, None, 2)}, 3, 9, process, ["pairs"]
        )


def test_counters_are_told_in_both_tongues() -> None:
    found = samples(Metrics(Counted()).text().decode())

    def value(name: str, **labels: str) -> float:
        return found[name, frozenset(labels.items())]

    model = {"model_name": "pairs"}
    triton = {"model": "pairs", "version": "1"}
    latency = "eclip_e2e_request_latency_seconds"
    assert value(f"{latency}_bucket", le="0.0005", **model) == 3
    assert value(f"{latency}_bucket", le="0.005", **model) == 5
    assert value(f"{latency}_bucket", le="10.0", **model) == 5
    assert value(f"{latency}_bucket", le="+Inf", **model) == 6
    assert value(f"{latency}_count", **model) == 6
    assert value(f"{latency}_sum", **model) == 12.5
    assert value("eclip_requests_refused_total", reason="overloaded", **model) == 4
    assert value("eclip_requests_refused_total", reason="expired", **model) == 0
    assert value("eclip_bound_seconds", **model) == 0.005
    assert value("eclip_yields_total", **model) == 17
    assert value("eclip_requests_late_total", **model) == 2
    assert value("eclip_requests_in_time_total", **model) == 3
    assert value("eclip_http_connections") == 3
    assert value("eclip_http_connections_opened_total") == 9
    assert value("eclip_process_cpu_seconds_total", process="front 0") == 1.5
    assert value("eclip_process_open_fds", process="front 0") == 12
    assert value("eclip_model_failed", **model) == 1
    assert value("eclip_ready") == 1
    assert value("eclip_requests_run_again_total", **model) == 3
    assert value("eclip_device_busy_share", device="gpu0") == 0.25
    assert value("eclip_device_restarts_total", device="gpu0") == 2
    assert value("nv_inference_request_success", **triton) == 5
    assert value("nv_inference_count", **triton) == 9
    assert value("nv_inference_request_duration_us", **triton) == 7000
    assert value("nv_inference_queue_duration_us", **triton) == 1.5
    names = {name for name, _ in found}
    assert not names & {"eclip_slack_seconds", "eclip_device_power_watts"}  # nobody can tell


def test_the_server_counts_what_it_refuses(server: NumpyServer) -> None:
    def ask() -> Samples:
        connection = HTTPConnection(server.http)
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        assert response.headers["content-type"].startswith("text/plain")
        found = samples(response.read().decode())
        connection.close()
        return found

    model = ("model_name", "identity_int8")
    refused = "eclip_requests_refused_total", frozenset({model, ("reason", "bad request")})
    served = "eclip_e2e_request_latency_seconds_count", frozenset({model})
    before = ask()
    module = tritonclient.http
    with module.InferenceServerClient(server.http) as client:
        given = module.InferInput("IN", (1, 1), "INT8")
        given.set_data_from_numpy(np.zeros((1, 1), np.int8))
        client.infer("identity_int8", [given])
        for _ in range(2):
            try:
                client.infer("identity_int8", [given, given])
            except module.InferenceServerException:
                continue
    after = ask()
    assert after[refused] - before[refused] == 2
    assert after[served] - before[served] == 1
