"""Results of lab/gpu/services.py: lines of a file, completed, and tables of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from lab.support import sharing
from lab.support.kept import read_rows
from lab.support.tables import print_table


def array_name(key: str) -> str:
    return key.replace(" ", "_").replace("/", "-")


def finish(folder: Path) -> list[dict[str, Any]]:
    """All results of the folder, with intervals where they were missing."""
    rows = read_rows(folder / "services.jsonl")
    for row in rows:
        file = folder / "latencies" / row.get("latencies", "")
        if "services" not in row or not file.is_file():
            continue
        if "low" in row["services"][0]["p99_ratio"]:
            continue
        with np.load(file) as kept:
            row["services"] = [
                sharing.with_intervals(
                    found,
                    kept[array_name(f"{row['way']} {service}")],
                    sharing.Latencies(kept[f"alone_{service}"], kept[f"ended_{service}"]),
                )
                for service, found in enumerate(row["services"])
            ]
    write_rows(folder, rows)
    return rows


def write_rows(folder: Path, rows: Iterable[dict[str, Any]]) -> None:
    """All at once, instead of those that are there."""
    path = folder / "services.jsonl"
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    partial.rename(path)


def show(rows: Iterable[dict[str, Any]]) -> None:
    lines = []
    for row in rows:
        for found in row.get("services", ()):
            p50, p99 = found["p50_ratio"], found["p99_ratio"]
            held = found.get("checks", {})
            lines.append(
                [
                    row["pair"],
                    f"{row['load']:g}",
                    row["way"],
                    f"{found['requests']}",
                    f"{found['alone']['p99_ms']:.2f}",
                    f"{found['latency']['p99_ms']:.2f}",
                    f"{p50['value']:.2f}",
                    f"{p99['value']:.2f}"
                    + (f" ({p99['low']:.2f}-{p99['high']:.2f})" if "low" in p99 else ""),
                    f"{1e3 * found['excess']['p99_ms']:.0f}",
                    f"{found['busy_share']:.2f}",
                    f"{row['background']:.3f}" if "background" in row else "",
                    f"{row['background_over_rest']:.3f}" if "background" in row else "",
                    f"{row['idle_cost']:.3f}" if row.get("idle_cost") is not None else "",
                    ", ".join(key for key, ok in held.items() if not ok) or ("ok" * bool(held)),
                ]
            )
    columns = ["pair", "load", "way", "n", "alone p99", "p99 ms", "p50 ×", "p99 × (95%)"]
    columns += ["excess p99 µs", "u", "background", "÷ (1-u)", "idle cost", "missed"]
    print_table("Services beside background", columns, lines)


def summarise(rows: Iterable[dict[str, Any]]) -> None:
    """The promises of issue 16 over all pairs, for every way that shares."""
    ways: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if "background" in row:
            ways.setdefault(row["way"], []).append(row)
    first = {_key(row): row for row in ways.get("priorities", [])}
    lines = []
    for way, mine in ways.items():
        rests = [row["background_over_rest"] for row in mine]
        costs = [row["idle_cost"] for row in mine if row["idle_cost"] is not None]
        held = [found["checks"] for row in mine for found in row["services"] if "checks" in found]
        gains = [
            theirs["latency"]["p99_ms"] / ours["latency"]["p99_ms"]
            for row in mine
            if _key(row) in first
            for ours, theirs in zip(row["services"], first[_key(row)]["services"], strict=True)
        ]
        lines.append(
            [
                way,
                f"{len(mine)}",
                f"{np.mean([row['background'] for row in mine]):.3f}",
                f"{min(rests):.3f}",
                f"{np.mean(rests):.3f}",
                f"{max(costs):.3f}" if costs else "",
                f"{np.exp(np.mean(np.log(gains))):.1f}" if gains else "",
                f"{min(gains):.2f}" if gains else "",
                f"{sum(all(one.values()) for one in held)}/{len(held)}" if held else "",
            ]
        )
    columns = ["way", "runs", "background", "÷ (1-u) least", "÷ (1-u) mean", "worst idle cost"]
    columns += ["p99 of priorities ÷ own", "least", "latency kept"]
    print_table("Over all pairs", columns, lines)


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["pair"], row["load"]
