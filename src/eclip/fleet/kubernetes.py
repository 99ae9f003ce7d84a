"""Kubernetes without Ray: a placement as manifests, one pod for each GPU.

Every pod runs ``eclip serve`` with a file of its own. A Service for each model spreads requests
over the pods that have it. Nothing is placed again when rates drift: render and apply anew. YAML is
imported where it is written: it comes with the extra for fleets.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from eclip.errors import UsageError
from eclip.fleet.config import FleetFile
from eclip.fleet.orders import GpuOrder, orders_of
from eclip.fleet.place.placement import Placement

Manifest = dict[str, Any]
MARK = b"# A fleet, one pod per GPU; made by eclip fleet render --k8s"
_HTTP, _GRPC = 8000, 8001
_GRACE_S = 60


def render(file: FleetFile, placement: Placement, image: str) -> list[Manifest]:
    """Manifests in the order in which they are applied."""
    manifests: list[Manifest] = []
    for order in orders_of(file, placement).values():
        name = _name(f"eclip-{order.gpu}")
        labels = {"app.kubernetes.io/name": "eclip", "eclip/gpu": name} | {
            _model_label(service.name): "yes" for service in order.config.services
        }
        text = config_text(order)
        manifests += [
            _manifest("v1", "ConfigMap", name) | {"data": {"models.toml": text}},
            _manifest("apps/v1", "Deployment", name, labels)
            | {"spec": _deployment(order, name, labels, image)},
        ]
    for service in file.fleet.services:
        spec = {
            "selector": {_model_label(service.name): "yes"},
            "ports": [
                {"name": "http", "port": _HTTP, "targetPort": "http"},
                {"name": "grpc", "port": _GRPC, "targetPort": "grpc"},
            ],
        }
        manifests.append(_manifest("v1", "Service", _name(service.name)) | {"spec": spec})
    names = [(one["kind"], one["metadata"]["name"]) for one in manifests]
    double = next((name for kind, name in names if names.count((kind, name)) > 1), None)
    if double is not None:
        raise UsageError(f"two names become {double!r} in Kubernetes; rename one of them")
    return manifests


def render_text(file: FleetFile, placement: Placement, image: str) -> str:
    """The same as YAML."""
    try:
        import yaml
    except ModuleNotFoundError:
        raise UsageError(
            "the package yaml is missing; install eclip with what a fleet needs: "
            "pip install 'eclip[fleet]'"
        ) from None

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        """Without references, and with files as lines: people read it."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    def as_lines(dumper: Any, text: str) -> Any:
        style = "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, as_lines)
    manifests = render(file, placement, image)
    documents = yaml.dump_all(manifests, Dumper=Dumper, sort_keys=False, width=100)
    return f"{MARK.decode()}\n{documents}"


def config_text(order: GpuOrder) -> str:
    """The file of a GPU's server."""
    server = msgspec.structs.replace(
        order.config.server, host="0.0.0.0", http_port=_HTTP, grpc_port=_GRPC
    )
    lines = [f"# {order.gpu}", "[server]", *_pairs(server)]
    for service in order.config.services:
        lines += ["", "[[service]]", *_pairs(service)]
    return "\n".join(lines) + "\n"


def _deployment(order: GpuOrder, name: str, labels: dict[str, str], image: str) -> dict[str, Any]:
    def probe(path: str, failures: int) -> dict[str, Any]:
        asked = {"path": f"/v2/health/{path}", "port": "http"}
        return {"httpGet": asked, "periodSeconds": 2, "failureThreshold": failures}

    container = {
        "name": "eclip",
        "image": image,
        "command": ["eclip", "serve", "/etc/eclip/models.toml"],
        "ports": [
            {"name": "http", "containerPort": _HTTP},
            {"name": "grpc", "containerPort": _GRPC},
        ],
        "resources": {"limits": {"nvidia.com/gpu": 1}},
        "startupProbe": probe("startup", 300),
        "readinessProbe": probe("ready", 1),
        "livenessProbe": probe("live", 5),
        "volumeMounts": [
            {"name": "config", "mountPath": "/etc/eclip"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    spec = {
        "nodeSelector": {
            "eclip/machine": order.gpu.machine,
            "eclip/gpu-kind": _name(order.gpu.kind),
        },
        "terminationGracePeriodSeconds": _GRACE_S,
        "containers": [container],
        "volumes": [
            {"name": "config", "configMap": {"name": name}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    return {
        "replicas": 1,
        "strategy": {"type": "Recreate"},  # a GPU has room for one
        "selector": {"matchLabels": {"eclip/gpu": name}},
        "template": {"metadata": {"labels": labels}, "spec": spec},
    }


def _manifest(version: str, kind: str, name: str, labels: dict[str, str] | None = None) -> Manifest:
    metadata: dict[str, Any] = {"name": name}
    if labels:
        metadata["labels"] = labels
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def _model_label(service: str) -> str:
    return f"eclip.model/{_name(service)}"


def _name(text: str) -> str:
    """A name as Kubernetes has them."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:63].strip("-")
    if not name:
        raise UsageError(f"{text!r} has nothing that Kubernetes takes for a name; use letters")
    return name if name[0].isalpha() else f"x{name}"[:63]


def _pairs(settings: msgspec.Struct) -> list[str]:
    """The keys that are not as they would be anyway."""
    given = msgspec.to_builtins(settings)
    defaults = {
        field.name: msgspec.to_builtins(field.default)
        for field in msgspec.structs.fields(settings)
        if field.default is not msgspec.NODEFAULT
    }
    return [
        f"{key} = {_toml(value)}"
        for key, value in given.items()
        if value is not None and (key not in defaults or defaults[key] != value)
    ]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        inside = ", ".join(f"{key} = {_toml(one)}" for key, one in value.items() if one is not None)
        return f"{{ {inside} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value)  # of texts, numbers and truth, TOML's are JSON's
