"""The files for Kubernetes and Docker: what a cluster would refuse, and what operators rely on."""

from __future__ import annotations

import importlib
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from eclip.server.config import make_config

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples/serving"


def manifests() -> dict[str, dict[str, Any]]:
    found = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    return {one["kind"]: one for one in found}


def test_kubernetes_schemas_take_the_files() -> None:
    try:
        validator = importlib.import_module("kubernetes_validate")
    except ModuleNotFoundError:
        pytest.skip("kubernetes-validate is not installed: its schemas take 100 MB")
    for manifest in manifests().values():
        validator.validate(manifest, "1.32", strict=True)


def test_the_pod_is_a_user_and_its_configuration_can_change() -> None:
    pod = manifests()["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 10001
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert not any("subPath" in mount for mount in container["volumeMounts"])
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes

    text = manifests()["ConfigMap"]["data"]["models.toml"]
    server = make_config(tomllib.loads(text), "models.toml").server
    assert server.watch and server.token_file == "/access/token"
    assert 2 * server.grace_seconds < pod["terminationGracePeriodSeconds"]
    folders = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {"/access", "/models", *server.profiles} <= folders
    assert container["args"] == ["/models/models.toml"]


def test_the_image_is_of_a_user_and_brings_what_the_wheel_is_built_from() -> None:
    lines = (EXAMPLES / "Dockerfile").read_text().splitlines()
    final = "\n".join(lines[len(lines) - 1 - lines[::-1].index("FROM python:3.12-slim") :])
    assert "USER 10001" in final and "g++" not in final and "COPY" not in final
    rules = (EXAMPLES / "Dockerfile.dockerignore").read_text().splitlines()
    kept = [rule[1:] for rule in rules if rule.startswith("!")]
    for path in kept:
        assert (ROOT / path).exists(), path
    for needed in ("pyproject.toml", "docs/package.md", "tools/wheel.py", "src", "native"):
        assert any(fnmatch(needed, path) for path in kept), needed
    hook = (ROOT / "pyproject.toml").read_text()
    assert 'path = "tools/wheel.py"' in hook and 'readme = "docs/package.md"' in hook
