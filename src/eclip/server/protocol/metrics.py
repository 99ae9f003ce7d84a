"""A server's counters as Prometheus text.

Latencies are histograms in seconds under names like vLLM's; Triton's names follow, so that its
dashboards and autoscalers find what they look for.
"""

from __future__ import annotations

import itertools
import platform
from collections.abc import Callable, Iterator
from importlib import metadata
from operator import attrgetter

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    UntypedMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from eclip.server.messages import (
    BUCKETS_S,
    Core,
    Counters,
    DeviceCounters,
    Durations,
    Reason,
    ServiceCounters,
)

_MODEL = ["model_name"]
_BUILD = ["version", "python"]

# name, help, what it is. Unknown gauges are left out.
_SERVICE_GAUGES: list[tuple[str, str, Callable[[ServiceCounters], float | None]]] = [
    ("batches_running", "Batches on the device now.", attrgetter("running")),
    ("rows_waiting", "Rows that wait now.", attrgetter("waiting")),
    ("bound_seconds", "The promise on the 99th percentile.", attrgetter("bound_s")),
    ("slack_seconds", "Least time left before a request breaks it.", attrgetter("slack_s")),
    ("busy_share", "Share of the time that the model ran.", attrgetter("busy_share")),
]
# Counters, so their names end in _total.
_SERVICE_COUNTERS: list[tuple[str, str, Callable[[ServiceCounters], int]]] = [
    ("requests_late", "Requests answered after the bound.", attrgetter("late")),
    (
        "requests_in_time",
        "Requests answered within the bound; without a bound, all that are answered.",
        lambda service: service.statistics.success.count - service.late,
    ),
    ("yields", "Times a model gave way.", attrgetter("yields")),
    ("requests_run_again", "Requests whose device process died.", attrgetter("run_again")),
]
_DEVICE_GAUGES: list[tuple[str, str, Callable[[DeviceCounters], float | None]]] = [
    ("device_busy_share", "Share of the time that the device ran.", attrgetter("busy_share")),
    ("device_power_watts", "What the device draws.", attrgetter("power_w")),
]
_PHASES = ("queue", "compute_input", "compute_infer", "compute_output")
# name, help, what it is, in which unit of ours
_TRITON: list[tuple[str, str, Callable[[ServiceCounters], float], float]] = [
    ("request_success", "Requests answered.", attrgetter("statistics.success.count"), 1),
    ("request_failure", "Requests that failed.", attrgetter("statistics.fail.count"), 1),
    ("count", "Rows inferred.", attrgetter("statistics.inferences"), 1),
    ("exec_count", "Batches run.", attrgetter("statistics.executions"), 1),
    ("pending_request_count", "Rows that wait now.", attrgetter("waiting"), 1),
    ("request_duration_us", "Sum over requests.", attrgetter("statistics.success.ns"), 1e-3),
    *(
        (f"{name}_duration_us", f"Sum of {name}.", attrgetter(f"statistics.{name}.ns"), 1e-3)
        for name in _PHASES
    ),
]


class Metrics(Collector):
    MEDIA_TYPE = CONTENT_TYPE_LATEST

    def __init__(self, core: Core) -> None:
        self._core = core
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> Iterator[Metric]:
        """Nothing: names are known when they are collected."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        counters = self._core.counters()
        yield _histogram(
            counters,
            "e2e_request_latency_seconds",
            "From a request's last byte read to its answer.",
            attrgetter("latency"),
        )
        yield _histogram(
            counters,
            "request_queue_time_seconds",
            "From a request's last byte read to its start on the device.",
            attrgetter("queue"),
        )
        yield _refused(counters)
        yield from _gauges(counters)
        for name, text, count in _SERVICE_COUNTERS:
            family = CounterMetricFamily(f"eclip_{name}", text, labels=_MODEL)
            for model, service in counters.services.items():
                if model:
                    family.add_metric([model], count(service))
            yield family
        restarts = CounterMetricFamily(
            "eclip_device_restarts", "Times a device's process was started anew.", labels=["device"]
        )
        for name, device in counters.devices.items():
            restarts.add_metric([name], device.restarts)
        yield restarts
        yield from self._server(counters)
        yield from _processes(counters)
        yield GaugeMetricFamily(
            "eclip_http_connections", "HTTP connections now.", counters.connections
        )
        yield CounterMetricFamily(
            "eclip_http_connections_opened", "HTTP connections since the start.", counters.connected
        )
        yield from self._triton(counters)

    def _server(self, counters: Counters) -> Iterator[Metric]:
        build = GaugeMetricFamily("eclip_build_info", "The version, as a label.", labels=_BUILD)
        build.add_metric([metadata.version("eclip"), platform.python_version()], 1)
        yield build
        yield GaugeMetricFamily("eclip_ready", "1: the server is ready.", int(self._core.ready))
        ready = GaugeMetricFamily("eclip_model_ready", "1: the model is ready.", labels=_MODEL)
        failed = GaugeMetricFamily(
            "eclip_model_failed", "1: the model should be loaded and could not be.", labels=_MODEL
        )
        for model in self._core.models:
            ready.add_metric([model], int(self._core.why_not_ready(model) is None))
            failed.add_metric([model], int(model in counters.failed))
        yield from (ready, failed)

    def _triton(self, counters: Counters) -> Iterator[Metric]:
        """Untyped: Triton's counters do not end in ``_total``, as Prometheus would have them."""
        for name, text, read, scale in _TRITON:
            family = UntypedMetricFamily(f"nv_inference_{name}", text, labels=["model", "version"])
            for model, service in counters.services.items():
                info = self._core.models.get(model)
                version = info.version if info else "1"
                family.add_metric([model, version], read(service) * scale)
            yield family


def _histogram(
    counters: Counters, name: str, text: str, read: Callable[[ServiceCounters], Durations]
) -> Metric:
    family = HistogramMetricFamily(f"eclip_{name}", text, labels=_MODEL)
    ends = [*(repr(end) for end in BUCKETS_S), "+Inf"]
    for model, service in counters.services.items():
        durations = read(service)
        cumulative = itertools.accumulate(durations.buckets)
        family.add_metric([model], list(zip(ends, cumulative, strict=True)), durations.total_s)
    return family


def _refused(counters: Counters) -> Metric:
    family = CounterMetricFamily(
        "eclip_requests_refused", "Requests without a result.", labels=[*_MODEL, "reason"]
    )
    for model, service in counters.services.items():
        for reason in Reason:
            family.add_metric([model, reason.value], service.refused.get(reason, 0))
    return family


def _processes(counters: Counters) -> Iterator[Metric]:
    of = ["process"]
    cpu = CounterMetricFamily("eclip_process_cpu_seconds", "CPU time of a process.", labels=of)
    memory = GaugeMetricFamily("eclip_process_resident_memory_bytes", "Its memory.", labels=of)
    files = GaugeMetricFamily("eclip_process_open_fds", "Its open descriptors.", labels=of)
    for name, process in counters.processes.items():
        cpu.add_metric([name], process.cpu_s)
        memory.add_metric([name], process.memory_bytes)
        files.add_metric([name], process.descriptors)
    yield from (cpu, memory, files)


def _gauges(counters: Counters) -> Iterator[Metric]:
    for name, text, read in _SERVICE_GAUGES:
        family = GaugeMetricFamily(f"eclip_{name}", text, labels=_MODEL)
        for model, service in counters.services.items():
            if (value := read(service)) is not None:
                family.add_metric([model], value)
        yield family
    for name, text, read_device in _DEVICE_GAUGES:
        family = GaugeMetricFamily(f"eclip_{name}", text, labels=["device"])
        for label, device in counters.devices.items():
            if (value := read_device(device)) is not None:
                family.add_metric([label], value)
        yield family
