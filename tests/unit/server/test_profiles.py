"""Models without a profile, on a device that computes: measured at the first start, and kept.

No GPU is here, so a modelled profile stands in for what measuring would write.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eclip.core.model_key import ModelKey
from eclip.core.trace import with_traces
from eclip.errors import DeviceError, UsageError
from eclip.files import store
from eclip.models import files
from eclip.models.library import file_of
from eclip.models.modelled import model_profile
from eclip.planner.case import find_calibration, find_topology
from eclip.server.config import ServingConfig, make_config
from eclip.server.device import host as hosts
from eclip.server.device.deploying import _unprofiled, resolve
from eclip.server.device.host import ServingHost
from eclip.server.device.models import announce_files
from eclip.server.log import ServerLog

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

    def measure(
        models: Sequence[ModelKey], folder: Path, *, gpu: int, quick: bool, **_: Any
    ) -> list[ModelKey]:
        assert (gpu, quick) == (1, True)
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
        "profiling quickly, once",
        "profiled",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["profiles"]
    assert starting.profile(MODEL).model == MODEL
    assert host.profile(MODEL).model == MODEL  # kept
    assert asked == [MODEL]


def test_a_built_in_model_is_served_in_the_batches_that_were_measured(host: ServingHost) -> None:
    config = make_config({"service": [{"name": "a", "model": "bert", "rate": 100}]}, "the test")
    assert _unprofiled(config, host) == []
    (found,) = resolve(config, host, {})  # without a log nothing may be measured
    assert found.batches == (1, 8, 32)


def test_a_new_model_is_measured_in_all_usual_batches_at_once(
    host: ServingHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def measure(models: Sequence[ModelKey], folder: Path, **_: Any) -> list[ModelKey]:
        asked.append([str(model) for model in models])
        for model in models:
            stand_in = model_profile(
                ModelKey("squeezenet", model.batch), host.topology, host.calibration
            )
            trace = msgspec.structs.replace(stand_in.trace, model=model)
            mine = with_traces(host.topology.fingerprint, [trace])
            made = msgspec.structs.replace(stand_in, trace=trace, fingerprint=mine)
            store.save(made, file_of(folder, model))
        return []

    monkeypatch.setattr(hosts, "measure_profiles", measure)
    tensor = {"name": "x", "datatype": "FP16", "shape": [8]}
    new = {"name": "n", "model": "my.package:net", "inputs": [tensor], "outputs": [tensor]}
    config = make_config(
        {"service": [new, {"name": "b", "model": "bert", "batches": [1, 3]}]}, "the test"
    )
    starting = replace(host, log=ServerLog(io.StringIO()))
    starting.measure(_unprofiled(config, starting))
    assert asked == [[*(f"my.package:net:{batch}" for batch in (1, 2, 4, 8, 16, 32)), "bert:3"]]
    new_, bert = resolve(config, host, {})
    assert (new_.batches, bert.batches) == ((1, 2, 4, 8, 16, 32), (1, 3))
    # One of `eclip profile` counts more than a quick one.
    full = msgspec.structs.replace(bert.profiles[1], source="measured in full")
    store.save(full, file_of(host.folders[0], ModelKey("bert", 3)))
    assert host.profile(ModelKey("bert", 3)).source == "measured in full"


def test_a_model_that_cannot_be_measured_is_said(
    host: ServingHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "measure_profiles", lambda models, *_, **__: models)
    with pytest.raises(DeviceError, match="squeezenet:3 could not be profiled"):
        replace(host, log=ServerLog(io.StringIO())).profile(MODEL)


def test_a_simulator_models_what_has_no_file(host: ServingHost) -> None:
    assert replace(host, computes=False, folders=()).profile(MODEL).modelled


def file_config(tmp_path: Path, **changed: Any) -> ServingConfig:
    path = tmp_path / "net.ts"
    path.write_bytes(b"")
    service = {
        "name": "bert",  # as one of the zoo, which it is not
        "file": str(path),
        "inputs": [{"name": "image", "datatype": "BF16", "shape": [3, 8]}],
        "outputs": [{"name": "scores", "datatype": "FP32", "shape": [10]}],
        "batches": [2],
        **changed,
    }
    return make_config({"service": [service]}, "the test")


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that a test announces are forgotten after it."""
    monkeypatch.setenv(files.VARIABLE, "{}")


@pytest.mark.usefixtures("forgetful")
def test_a_file_is_measured_under_a_name_of_its_own(
    host: ServingHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(models: Sequence[ModelKey], folder: Path, **_: Any) -> list[ModelKey]:
        (model,) = models
        # A child finds the file by this name, and nothing else is told to it.
        child = [sys.executable, "-c", FIND, model.name]
        found = subprocess.check_output(child, text=True).split()
        assert found == [str(tmp_path / "net.ts"), "bfloat16", "3", "8"]
        stand_in = model_profile(ModelKey("squeezenet", 2), host.topology, host.calibration)
        trace = msgspec.structs.replace(stand_in.trace, model=model)
        mine = with_traces(host.topology.fingerprint, [trace])
        made = msgspec.structs.replace(stand_in, trace=trace, fingerprint=mine)
        store.save(made, file_of(folder, model))
        return []

    monkeypatch.setattr(hosts, "measure_profiles", measure)
    config = file_config(tmp_path)
    announce_files(config.services)
    (found,) = resolve(config, replace(host, log=ServerLog(io.StringIO())), {})
    assert [str(profile.model) for profile in found.profiles] == ["file.bert:2"]


FIND = """
import sys
from eclip.models.files import find_file
found = find_file(sys.argv[1])
print(found.file, *(word for kind, shape in found.inputs for word in (kind, *shape)))
"""


@pytest.mark.usefixtures("forgetful")
def test_a_file_that_came_later_is_measured_by_another_start(
    host: ServingHost, tmp_path: Path
) -> None:
    config = file_config(tmp_path)
    announce_files(config.services)
    with pytest.raises(UsageError, match="start the server again"):
        resolve(config, host, {})


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"file": "nowhere.pt2"}, "there is no file nowhere.pt2"),
        ({"inputs": [{"name": "a", "datatype": "FP32", "shape": [-1]}]}, "inputs are needed"),
        ({"inputs": [{"name": "a", "datatype": "BYTES", "shape": [1]}]}, "inputs are needed"),
        ({"inputs": []}, "inputs are needed"),
    ],
)
def test_a_file_that_cannot_be_served_is_refused_first(
    host: ServingHost, tmp_path: Path, changed: dict[str, Any], line: str
) -> None:
    with pytest.raises(UsageError, match=line):
        resolve(file_config(tmp_path, **changed), host, {})
