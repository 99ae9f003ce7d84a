"""The bench of faults: what it serves where, and what it leaves out there."""

from __future__ import annotations

import tomllib
from types import SimpleNamespace
from typing import Any

import pytest
from lab.serving.faults import FAULTS, MODELS, TOO_LARGE, left_out, settings_of

from eclip.server.config import make_config


@pytest.mark.parametrize("device", MODELS)
def test_a_server_takes_its_file(device: str) -> None:
    config = make_config(tomllib.loads(settings_of(device) + TOO_LARGE), "the bench")
    assert config.server.device == device
    assert [one.name for one in config.services] == [*MODELS[device], "toolarge"]
    add = config.services[0]
    assert [one.name for one in add.inputs] == ["a", "b"]
    assert add.computes_on_cpu == (device == "sim")


def test_what_cannot_be_made_here_is_left_out() -> None:
    def server(device: str, small_disk: bool) -> Any:
        return SimpleNamespace(device=device, small_disk=small_disk)

    assert left_out(server("sim", True)) == []
    assert left_out(server("sim", False)) == ["disk full"]
    assert "a model that hangs" in left_out(server("cuda", True))
    assert set(left_out(server("cuda", False))) <= set(FAULTS)
