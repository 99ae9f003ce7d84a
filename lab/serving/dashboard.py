"""Draws what the queries of the Grafana dashboard give, from a real Prometheus beside load.

    python lab/serving/dashboard.py PICTURE.png [--seconds 60]

Grafana is in no package of Debian. This page asks the same queries and draws them as plain lines.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import re
import socket
import subprocess
import tempfile
import threading
import time
import tomllib
import urllib.parse
import urllib.request
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import yaml
from lab.support.pages import started

import eclip

_SERVING = Path(__file__).parents[2] / "examples/serving"
_COLOURS = ("#3a6ea5", "#c2571a", "#4b8b3b", "#8e4fa8", "#a8832a", "#5b7083", "#b03060")
_WIDTH, _HEIGHT = 380, 130
_UNITS = {"s": (1e3, "ms"), "bytes": (1 / 2**20, "MiB"), "percentunit": (100, "%")}


def ask(url: str, model: str, pause_s: Any, until: float) -> None:
    """One client; the pause between two requests follows the time."""
    tensors = [
        {"name": name, "datatype": "INT32", "shape": [1, 4], "data": [1] * 4} for name in "ab"
    ]
    if model == "shout":
        tensors = [{"name": "text", "datatype": "BYTES", "shape": [8, 1], "data": ["a"] * 8}]
    elif model == "digits":
        tensors = [{"name": "image", "datatype": "FP32", "shape": [1, 64], "data": [0.5] * 64}]
    body = json.dumps({"inputs": tensors})
    host, _, port = url.removeprefix("http://").partition(":")
    begin = time.monotonic()
    with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=30)) as connection:
        while time.monotonic() < until:
            connection.request("POST", f"/v2/models/{model}/infer", body)
            connection.getresponse().read()
            time.sleep(pause_s(time.monotonic() - begin))


@contextlib.contextmanager
def prometheus(url: str) -> Iterator[str]:
    """A Prometheus that scrapes the server each second; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    target = {"static_configs": [{"targets": [url.removeprefix("http://")]}], "job_name": "eclip"}
    settings = {"global": {"scrape_interval": "1s"}, "scrape_configs": [target]}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prometheus.yml"
        file.write_text(yaml.safe_dump(settings))
        process = subprocess.Popen(
            ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={folder}/data",
             f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
        )  # fmt: skip
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def series(address: str, query: str, begin: float, end: float) -> list[dict[str, Any]]:
    asked = urllib.parse.urlencode({"query": query, "start": begin, "end": end, "step": 1})
    with urllib.request.urlopen(f"{address}/api/v1/query_range?{asked}") as answer:
        found: list[dict[str, Any]] = json.loads(answer.read())["data"]["result"]
    return found


def panel(address: str, given: dict[str, Any], begin: float, end: float) -> str:
    """A panel of the dashboard as SVG."""
    unit = given["fieldConfig"]["defaults"]["unit"]
    scale, word = _UNITS.get(
        unit, (1, {"reqps": "requests/s", "ops": "1/s", "watt": "W"}.get(unit, ""))
    )
    lines: list[tuple[str, list[tuple[float, float]]]] = []
    for target in given["targets"]:
        query = re.sub(r"\$(model|job)", ".*", target["expr"]).replace("$__rate_interval", "5s")
        for one in series(address, query, begin, end):
            name = re.sub(r"{{(\w+)}}", lambda m, one=one: one["metric"].get(m[1], ""),  # type: ignore[misc]
                          target["legendFormat"])  # fmt: skip
            points = [(at, scale * float(value)) for at, value in one["values"] if value != "NaN"]
            lines.append((name, points))
    most = max((value for _, points in lines for _, value in points), default=0.0) or 1.0
    drawn, legend = [], []
    for number, (name, points) in enumerate(lines[:7]):
        colour = _COLOURS[number]
        places = " ".join(
            f"{_WIDTH * (at - begin) / (end - begin):.1f},{_HEIGHT * (1 - value / most):.1f}"
            for at, value in points
        )
        drawn.append(
            f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        legend.append(f'<span><i style="background:{colour}"></i>{escape(name)}</span>')
    return (
        f"<section><h2>{escape(given['title'])}</h2><small>0 to {most:.3g} {word}</small>"
        f'<svg viewBox="0 -4 {_WIDTH} {_HEIGHT + 8}">'
        f'<path d="M0 {_HEIGHT}H{_WIDTH}" stroke="#bbb"/>'
        f"{''.join(drawn)}</svg><p>{''.join(legend)}</p></section>"
    )


_STYLE = """body { font: 13px sans-serif; margin: 16px; background: #fff; color: #222; }
main { display: grid; grid-template-columns: repeat(3, 1fr); gap: 12px; }
section { border: 1px solid #ddd; border-radius: 4px; padding: 8px 12px; }
h2 { font-size: 14px; margin: 0; } small { color: #666; } svg { width: 100%; display: block; }
p { margin: 4px 0 0; } p span { margin-right: 10px; } p { font-size: 11px; }
i { display: inline-block; width: 9px; height: 9px; margin-right: 4px; }"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    config = tomllib.loads((_SERVING / "models.toml").read_text())
    dashboard = json.loads((_SERVING / "prometheus/dashboard.json").read_text())
    seconds = arguments.seconds
    with eclip.serve(config, http_port=0, grpc_port=0) as server, prometheus(server.url) as address:
        begin = time.time()
        until = time.monotonic() + seconds
        pauses = {  # steady; more in the middle third; as fast as it goes
            "digits": lambda _: 0.02,
            "add": lambda at: 0.005 if seconds / 3 < at < 2 * seconds / 3 else 0.05,
            "shout": lambda _: 0.0,
        }
        clients = [
            threading.Thread(target=ask, args=(server.url, model, pause_s, until))
            for model, pause_s in pauses.items()
        ]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        drawn = [panel(address, one, begin + 3, time.time()) for one in dashboard["panels"]]
    page = (
        f"<!doctype html><meta charset=utf-8><style>{_STYLE}</style><main>{''.join(drawn)}</main>"
    )
    with started(60.0) as browser:
        if browser is None:
            raise SystemExit("no browser is installed")
        shown = browser.new_page(viewport={"width": 1280, "height": 800})
        shown.set_content(page)
        shown.screenshot(path=str(arguments.picture), full_page=True)


if __name__ == "__main__":
    main()
