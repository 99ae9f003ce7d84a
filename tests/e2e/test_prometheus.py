"""What operators look at, through a real Prometheus: names, dashboard and alert rules."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_process import ServeProcess, service
from waiting import until

EXAMPLES = Path(__file__).parents[2] / "examples/serving/prometheus"


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; Debian's package prometheus has it")
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """With a model that fails, a model that is background, and requests of every kind."""
    background = service("background", "eclip.server.demo_models:add").replace(
        'bound = "60s"', 'tier = "background"'
    )
    more = [service("broken", "serving_functions:broken"), background]
    wrong = service("wrong", "serving_functions:wrong")
    server = ServeProcess(tmp_path_factory.mktemp("serve"), services="\n".join([*more, wrong]))
    yield server
    server.process.kill()
    server.process.wait()


def test_names_and_units_are_as_prometheus_has_them(server: ServeProcess) -> None:
    promtool = tool("promtool")
    text = server.get("/metrics")[1].decode()
    ours = "".join(line for line in text.splitlines(True) if "nv_inference" not in line)
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=ours, capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_the_examples_are_valid() -> None:
    promtool = tool("promtool")
    for arguments in (["rules", "alerts.yaml"], ["config", "prometheus.yml"]):
        subprocess.run(
            [promtool, "check", *arguments], cwd=EXAMPLES, check=True, capture_output=True
        )


class Prometheus:
    """Scrapes one server, once a second."""

    def __init__(self, folder: Path, scraped: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        target = {"job_name": "eclip", "static_configs": [{"targets": [f"127.0.0.1:{scraped}"]}]}
        settings = {"global": {"scrape_interval": "500ms"}, "scrape_configs": [target]}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
        self.log = (folder / "log").open("w")
        self.process = subprocess.Popen(
            [tool("prometheus"), f"--config.file={folder}/prometheus.yml",
             f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{self.port}"],
            stdout=self.log, stderr=self.log,
        )  # fmt: skip

    def query(self, text: str) -> list[Any]:
        asked = urllib.parse.urlencode({"query": text})
        address = f"http://127.0.0.1:{self.port}/api/v1/query?{asked}"
        try:
            with urllib.request.urlopen(address, timeout=60) as answer:
                found = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{text}: {error.read().decode()}") from None
        assert found["status"] == "success", found
        result: list[Any] = found["data"]["result"]
        return result

    def scrapes(self) -> int:
        try:
            found = self.query("count_over_time(eclip_ready[5m])")
        except (OSError, AssertionError):  # it does not listen yet, or is just starting
            return 0
        return int(found[0]["value"][1]) if found else 0

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        self.log.close()


def queries() -> dict[str, str]:
    """Of the dashboard, with its variables as Grafana fills them, and of the rules."""
    dashboard = json.loads((EXAMPLES / "dashboard.json").read_text())
    found = {}
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            text = re.sub(r"\$(model|job)", ".*", target["expr"])
            found[f"{panel['title']} {target['refId']}"] = text.replace("$__rate_interval", "30s")
    rules = yaml.safe_load((EXAMPLES / "alerts.yaml").read_text())
    for rule in rules["groups"][0]["rules"]:
        found[rule["alert"]] = rule["expr"]
    return found


def test_every_query_of_the_dashboard_and_the_rules_finds_something(
    server: ServeProcess, tmp_path: Path
) -> None:
    prometheus = Prometheus(tmp_path, server.port)
    try:
        for name in ("add", "broken", "background"):  # a counter has a rate from its second value
            assert server.add(1, name)[0] == 200
        assert server.add(13, "broken")[0] == 500
        assert until(lambda: prometheus.scrapes() > 2, patience_s=60)
        for number in range(40):
            assert server.add(number, "add")[0] == 200
            server.add(13, "broken")
            server.add(number, "background")
        seen = prometheus.scrapes()
        assert until(lambda: prometheus.scrapes() > seen + 2, patience_s=60)
        found = {name: prometheus.query(text) for name, text in queries().items()}
        names = {name for name, result in found.items() if not result}
        # A good server is not late, overloaded, not ready, or without a device.
        assert names == {
            "EclipLate", "EclipRefuses", "EclipNotReady", "EclipDeviceRestarts", "EclipConnections",
        }  # fmt: skip
        share = {one["metric"]["model_name"]: one["value"][1] for one in found["Share in time A"]}
        assert share["add"] == "1"
        assert found["EclipFails"][0]["metric"]["model_name"] == "broken"
        assert found["EclipModelFailed"][0]["metric"]["model_name"] == "wrong"
    finally:
        prometheus.close()


def test_answers_say_where_their_time_went_and_the_log_has_their_trace(
    server: ServeProcess,
) -> None:

    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    tensors = [
        {"name": name, "datatype": "INT32", "shape": [1, 4], "data": [1] * 4} for name in "ab"
    ]
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    for model, status in (("add", 200), ("broken", 500)):
        tensors[0]["data"] = [13] * 4
        body = json.dumps({"inputs": tensors})
        connection.request("POST", f"/v2/models/{model}/infer", body, {"traceparent": trace})
        response = connection.getresponse()
        response.read()
        assert response.status == status
        if status == 200:
            spans = dict(
                one.split(";dur=") for one in response.headers["server-timing"].split(", ")
            )
            assert list(spans) == ["queue", "device", "total"]
            assert (
                0 < float(spans["queue"]) + float(spans["device"]) <= float(spans["total"]) + 0.01
            )
    connection.close()
    assert until(lambda: '"traceparent"' in server.said, patience_s=60)
    line = next(line for line in server.lines() if line.get("traceparent") == trace)
    assert (line["event"], line["model"]) == ("request", "add") and line["total_ms"] > 0
