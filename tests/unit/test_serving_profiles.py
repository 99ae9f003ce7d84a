"""Models without a profile, on a device that computes: measured at the first start, and kept.

No GPU is here, so a modelled profile stands in for what measuring would write.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eclip.artefacts import store
from eclip.artefacts.model_key import ModelKey
from eclip.errors import DeviceError, UsageError
from eclip.frontends.library import file_of
from eclip.frontends.modelled import model_profile
from eclip.lab.case import find_calibration, find_topology
from eclip.serving import host as hosts
from eclip.serving.host import ServingHost
from eclip.serving.log import ServerLog

MODEL = ModelKey("squeezenet", 3)  # the package has no file of this batch


@pytest.fixture
def host(tmp_path: Path) -> ServingHost:
    topology = find_topology("h200")
    return ServingHost(
        topology=topology,
        calibration=find_calibration(None, topology),
        computes=True,
        folders=(tmp_path / "profiles",),
        title="a GPU",
    )


def test_a_running_server_refuses_to_measure(host: ServingHost) -> None:
    with pytest.raises(UsageError, match=r"squeezenet:3 has no profile.* eclip profile"):
        host.profile(MODEL)


def test_the_first_start_measures_once(
    host: ServingHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[ModelKey] = []

    def measure(models: Sequence[ModelKey], folder: Path, *, gpu: int, **_: Any) -> list[ModelKey]:
        assert gpu == 1
        asked.extend(models)
        for model in models:
            made = model_profile(model, host.topology, host.calibration)
            store.save(made, file_of(folder, model))
        return []

    monkeypatch.setattr(hosts, "measure_profiles", measure)
    said = io.StringIO()
    starting = replace(host, gpu=1, log=ServerLog(said))
    assert starting.profile(MODEL).model == MODEL
    assert [json.loads(line)["event"] for line in said.getvalue().splitlines()] == [
        "profiling, once",
        "profiled",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["profiles"]
    assert starting.profile(MODEL).model == MODEL
    assert host.profile(MODEL).model == MODEL  # kept
    assert asked == [MODEL]


def test_a_model_that_cannot_be_measured_is_said(
    host: ServingHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "measure_profiles", lambda models, *_, **__: models)
    with pytest.raises(DeviceError, match="squeezenet:3 could not be profiled"):
        replace(host, log=ServerLog(io.StringIO())).profile(MODEL)


def test_a_simulator_models_what_has_no_file(host: ServingHost) -> None:
    assert replace(host, computes=False, folders=()).profile(MODEL).modelled
