"""A whole server under hostile requests of every protocol. Nobody hangs, no answer is wrong, and
nothing grows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

import hostile
from serve_process import ServeProcess, service
from served_core import held

_SHOUT = """
[[service]]
name = "shout"
model = "numpy:eclip.server.demo_models:shout"
inputs = [{ name = "text", datatype = "BYTES", shape = [1], room = 64 }]
outputs = [{ name = "text", datatype = "BYTES", shape = [1], room = 64 }]
batches = [1, 8]
"""
_GOOD_EVERY = 100
_MIB = 32  # that a process may grow by: allocators keep what they once needed


class Target:
    """A server, how much was sent to it, and what its processes held when it was warm."""

    def __init__(self, server: ServeProcess) -> None:
        self.server = server
        self.sent = self.wrong = 0
        self.before: dict[int, tuple[int, int, int]] = {}
        line = next(line for line in server.lines() if line["event"] == "ready")
        own = [("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.insecure_channel(f"127.0.0.1:{line['grpc']}", own)
        # Of the processes that serve. A spare device process still imports what it needs.
        parts = server.children().items()
        self._pids = [pid for pid, part in parts if part == "front.process"]
        self._pids += [
            line["pid"] for line in server.lines() if line["event"] == "device process is ready"
        ]

    def send(self, kind: str, what: Any) -> None:
        port = self.server.port
        if kind == "bytes":
            hostile.send_bytes(port, what)
        elif kind == "request":
            hostile.send_request(port, *what)
        elif kind == "nearly":
            model, parameters = what
            body = hostile.good_bodies(model) | {"parameters": parameters}
            hostile.send_request(port, model, body, b"", None, {})
        else:
            method, message, deadline_s = what
            hostile.call(self.channel, method, message, deadline_s)
        self.sent += 1
        if self.sent % _GOOD_EVERY == 0:
            self.check()
        if self.sent == 3 * _GOOD_EVERY:  # by then caches and pools are filled
            self.before = self.held()

    def check(self) -> None:
        """A good request of each model, over both protocols, is answered rightly."""
        for model in ("add", "slow"):
            status, answer = self.server.add(7, model)
            assert (status, answer["outputs"][0]["data"]) == (200, [14] * 4)
        status, answer = self.server.post("/v2/models/shout/infer", hostile.good_bodies("shout"))
        assert (status, answer["outputs"][0]["data"]) == (200, ["AB"])
        asked = pb.ModelInferRequest(model_name="add")
        for name in "ab":
            asked.inputs.add(name=name, datatype="INT32", shape=[1, 4])
            asked.inputs[-1].contents.int_contents.extend([7] * 4)
        infer: Any = self.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        told = pb.ModelInferResponse.FromString(infer(asked.SerializeToString(), timeout=120))
        assert told.raw_output_contents[0] == (14).to_bytes(4, "little") * 4

    def held(self) -> dict[int, tuple[int, int, int]]:
        return {pid: held(pid) for pid in self._pids}

    def check_growth(self) -> None:
        for pid, (files, threads, mib) in self.held().items():
            files_then, threads_then, mib_then = self.before[pid]
            assert files <= files_then + 8, pid  # connections that are just ending
            assert threads <= threads_then + 2, pid
            assert mib <= mib_then + _MIB, pid


@pytest.fixture
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    more = [service("slow", "serving_functions:slow"), _SHOUT]
    server = ServeProcess(tmp_path_factory.mktemp("serve"), services="\n".join(more))
    yield Target(server)
    assert server.end() == 0
    serious = [line for line in server.lines() if "fault" in line or "ended" in line["event"]]
    assert serious == []


_CALLS = st.tuples(
    hostile.METHODS.filter(lambda name: name != "RepositoryModelLoad"),
    hostile.MESSAGES.map(lambda message: message.SerializeToString()) | st.binary(max_size=60),
    hostile.DEADLINES_S,
) | st.tuples(
    st.just("ModelInfer"),
    hostile.MESSAGES.map(lambda message: message.SerializeToString()),
    hostile.DEADLINES_S,
)
_ANY = (
    st.tuples(st.just("bytes"), hostile.TRAFFIC)
    | st.tuples(
        st.just("request"),
        st.tuples(
            hostile.MODELS, hostile.REQUESTS, hostile.BINARY, hostile.LENGTHS, hostile.HEADERS
        ),
    )
    | st.tuples(st.just("nearly"), hostile.NEARLY)
    | st.tuples(st.just("call"), _CALLS)
)


@pytest.mark.parametrize(
    "count",
    [600, pytest.param(100_000, marks=(pytest.mark.long, pytest.mark.timeout(7200)))],
)
def test_hostile_requests_stop_nobody(target: Target, count: int) -> None:
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(what=_ANY)
    def send(what: tuple[str, Any]) -> None:
        target.send(*what)

    send()
    assert target.sent >= count
    target.check()
    target.check_growth()
    print(json.dumps({"requests": target.sent, "held": list(target.held().values())}))
