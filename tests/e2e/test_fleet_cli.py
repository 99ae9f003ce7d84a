"""``eclip fleet`` as its users meet it: a plan, what must move, JSON, and ways to get it wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import Cli, assert_refused

FLEET = """
[[service]]
name = "search"
model = "alexnet:1"
rate = 300
bound = "5ms"
instances = 2

[[service]]
name = "photos"
model = "resnet50:8"
rate = 100
bound = "12ms"

[[gpus]]
machine = "a"
kind = "h200"

[[gpus]]
machine = "b"
kind = "h200"
"""


@pytest.fixture
def fleet(cli: Cli) -> Path:
    path = Path("fleet.toml")  # the fixture cli works in a folder of its own
    path.write_text(FLEET)
    return path


def test_plan_is_printed_and_written_and_then_nothing_moves(cli: Cli, fleet: Path) -> None:
    told = json.loads(
        cli(
            "fleet",
            "plan",
            fleet,
            "--steps",
            "2",
            "-o",
            "p.json",
            "--scores",
            "s.json.gz",
            "--json",
        ).out
    )
    machines = [placed["gpu"]["machine"] for placed in told["placement"]["gpus"]]
    assert machines == ["a", "b"]
    assert Path("s.json.gz").exists()
    again = cli("fleet", "plan", fleet, "--steps", "0", "--running", "p.json").out
    assert "0 instances to load" in again and "modelled" in again


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("h200", "h300"), "h300"),
        (("5ms", "0.01ms"), "one request takes"),
        (("photos", "search"), "two entries"),
        (("rate = 300", "rate = 300\\nrat = 1"), "rat"),
        (("alexnet:1", "alexnot:1"), "unknown model"),
        (("[[service]]", 'objective = "most"\\n[[service]]'), "unknown objective"),
    ],
)
def test_bad_fleets_end_in_one_line(
    cli: Cli, fleet: Path, change: tuple[str, str], words: str
) -> None:
    fleet.write_text(FLEET.replace(*change, 1).replace("\\n", "\n"))
    assert_refused(cli("fleet", "plan", fleet, "--steps", "0"), words)


def test_options_that_go_together_are_named(cli: Cli, fleet: Path) -> None:
    assert_refused(cli("fleet", "plan", fleet, "--picture", "d.svg"), "--simulate")
    assert_refused(cli("fleet", "plan", fleet, "--exact", "--running", "p.json"), "exclude")
    assert_refused(cli("fleet", "plan", fleet, "--running", "p.json"), "cannot read p.json")
    assert_refused(cli("fleet", "plan", fleet, "-o", "missing/p.json"), "no folder missing")
