"""The messages of gRPC: generated from what is checked in, and those that Triton's clients have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from tritonclient.grpc import model_config_pb2, service_pb2

import eclip
from eclip.server.protocol import inference_pb2

_SOURCES = Path(eclip.__file__).parents[1]
_PROTO = "eclip/server/protocol/inference.proto"


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{_SOURCES}", f"--python_out={tmp_path}",
         f"--pyi_out={tmp_path}", _PROTO],
        check=True,
    )  # fmt: skip
    for suffix in ("py", "pyi"):
        name = f"eclip/server/protocol/inference_pb2.{suffix}"
        assert (tmp_path / name).read_text() == (_SOURCES / name).read_text(), "run: make proto"


def describe(field: FieldDescriptor) -> tuple[object, ...]:
    """What decides how a field looks on the wire, and the names that clients use."""
    kind = field.message_type.name if field.message_type else None
    values = [(one.name, one.number) for one in field.enum_type.values] if field.enum_type else []
    return field.name, field.number, field.type, field.is_repeated, kind, values


def all_fields(messages: list[Descriptor]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for message in messages:
        name = message.full_name.removeprefix("eclip.server.").removeprefix("inference.")
        found[name] = {repr(describe(one)) for one in message.fields}
        found |= all_fields(list(message.nested_types))
    return found


def test_messages_have_the_numbers_that_clients_know() -> None:
    ours = all_fields(list(inference_pb2.DESCRIPTOR.message_types_by_name.values()))
    theirs = all_fields(
        [
            *service_pb2.DESCRIPTOR.message_types_by_name.values(),
            *model_config_pb2.DESCRIPTOR.message_types_by_name.values(),
        ]
    )
    for name in ("HealthCheckRequest", "HealthCheckResponse"):  # of grpc.health.v1
        del ours[name]
    health = inference_pb2.HealthCheckResponse(status="NOT_SERVING")
    assert health.SerializeToString() == b"\x08\x02"
    assert inference_pb2.HealthCheckRequest(service="m").SerializeToString() == b"\x0a\x01m"
    assert len(ours) > 40
    for name, ours_of_it in ours.items():
        assert ours_of_it <= theirs[name], name
