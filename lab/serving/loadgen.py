"""MLPerf's LoadGen drives a server: its own arrivals, its own clock, its own verdict.

    pip install mlcommons-loadgen
    PYTHONPATH=src python lab/serving/loadgen.py examples/serving/models.toml digits \
        --qps 100 --bound-ms 50 --offline-qps 1500

A server is started from the file. The *server* scenario sends requests at Poisson times and asks
whether p99 is within the bound; the *offline* scenario hands over everything at once and asks how
fast it is done. LoadGen's logs go to a folder, with every setting. This is no submission: models,
data set and duration are not those of a benchmark.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import mlperf_loadgen
import numpy as np
import tritonclient.grpc as triton

import eclip

SAMPLES = 1024  # different inputs
OFFLINE_IN_FLIGHT = 24  # more could not be answered within the bound, and would be refused
_PAUSE_S = 0.01
# Of LoadGen's summary: the verdict with its reasons, and the numbers.
_TOLD = (
    r"Result is|  \w.* satisfied|Early| \* |Scheduled|Completed|Samples per|"
    r"\d+.*percentile|target_"
)
DTYPES = {"FP32": np.float32, "FP16": np.float16, "INT32": np.int32, "INT64": np.int64}


class SystemUnderTest:
    """Sends samples to the server and tells LoadGen when their answers are there."""

    def __init__(self, address: str, model: str, in_flight: int | None) -> None:
        self.answers: Counter[str] = Counter()
        self._client = triton.InferenceServerClient(address)
        self._model = model
        self._inputs = self._make_inputs()
        self._room = None if in_flight is None else threading.Semaphore(in_flight)
        self._lock = threading.Lock()

    def _make_inputs(self) -> list[list[triton.InferInput]]:
        metadata = self._client.get_model_metadata(self._model, as_json=True)
        random = np.random.default_rng(1)
        made = []
        for _ in range(SAMPLES):
            row = []
            for tensor in metadata["inputs"]:
                shape = [1, *(int(size) for size in tensor["shape"][1:])]
                given = triton.InferInput(tensor["name"], shape, tensor["datatype"])
                values = random.integers(0, 2, shape).astype(DTYPES[tensor["datatype"]])
                given.set_data_from_numpy(values)
                row.append(given)
            made.append(row)
        return made

    def issue(self, queries: list[Any]) -> None:
        for query in queries:
            if self._room is not None:
                self._room.acquire()
            self._ask(query.id, query.index)

    def _ask(self, number: int, index: int) -> None:
        def done(result: Any, error: Any) -> None:
            with self._lock:
                self.answers["answered" if error is None else str(error.status())] += 1
            if error is not None and self._room is not None:
                # Nobody waits for what is offline: ask again, a little later.
                threading.Timer(_PAUSE_S, self._ask, (number, index)).start()
                return
            if self._room is not None:
                self._room.release()
            response = mlperf_loadgen.QuerySampleResponse(number, 0, 0)
            mlperf_loadgen.QuerySamplesComplete([response])

        self._client.async_infer(self._model, self._inputs[index], callback=done)

    def flush(self) -> None:
        """Nothing is held back."""


def settings_of(scenario: str, arguments: argparse.Namespace) -> Any:
    settings = mlperf_loadgen.TestSettings()
    settings.mode = mlperf_loadgen.TestMode.PerformanceOnly
    settings.min_duration_ms = round(1000 * arguments.seconds)
    if scenario == "server":
        settings.scenario = mlperf_loadgen.TestScenario.Server
        settings.server_target_qps = arguments.qps
        settings.server_target_latency_ns = round(1e6 * arguments.bound_ms)
        settings.server_target_latency_percentile = 0.99
        settings.min_query_count = arguments.least_queries
    else:
        settings.scenario = mlperf_loadgen.TestScenario.Offline
        settings.offline_expected_qps = arguments.offline_qps
    return settings


def drive(address: str, scenario: str, arguments: argparse.Namespace, folder: Path) -> None:
    system = SystemUnderTest(
        address, arguments.model, OFFLINE_IN_FLIGHT if scenario == "offline" else None
    )
    tested = mlperf_loadgen.ConstructSUT(system.issue, system.flush)
    library = mlperf_loadgen.ConstructQSL(SAMPLES, SAMPLES, lambda _: None, lambda _: None)
    output = mlperf_loadgen.LogOutputSettings()
    output.outdir = str(folder)
    output.copy_summary_to_stdout = False
    logs = mlperf_loadgen.LogSettings()
    logs.log_output = output
    logs.enable_trace = False
    mlperf_loadgen.StartTestWithLogSettings(tested, library, settings_of(scenario, arguments), logs)
    mlperf_loadgen.DestroyQSL(library)
    mlperf_loadgen.DestroySUT(tested)
    summary = (folder / "mlperf_log_summary.txt").read_text()
    print(f"--- {scenario} ---")
    for line in summary.splitlines():
        if re.match(_TOLD, line):
            print(re.sub(r"\s+", " ", line))
    print("answers:", ", ".join(f"{count} {what}" for what, count in system.answers.items()))
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", help="a TOML file as `eclip serve` takes it")
    parser.add_argument("model", help="the service to ask")
    parser.add_argument("--device", help="instead of the file's")
    parser.add_argument("--qps", type=float, required=True)
    parser.add_argument("--offline-qps", type=float, required=True, help="more than it can do")
    parser.add_argument("--bound-ms", type=float, required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--least-queries", type=int, default=1000)
    parser.add_argument("--logs", type=Path, help="where LoadGen's logs go")
    arguments = parser.parse_args()
    folder = arguments.logs or Path(tempfile.mkdtemp(prefix="loadgen-"))
    with eclip.serve(arguments.config, device=arguments.device, http_port=0, grpc_port=0) as server:
        for scenario in ("server", "offline"):
            (folder / scenario).mkdir(parents=True, exist_ok=True)
            drive(server.grpc, scenario, arguments, folder / scenario)
    print(f"LoadGen's logs: {folder}")


if __name__ == "__main__":
    main()
