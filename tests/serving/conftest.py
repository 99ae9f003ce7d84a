"""One server for all tests of a process: it has to survive them, and to complain about nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from numpy_server import NumpyServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NumpyServer]:
    server = NumpyServer(tmp_path_factory.mktemp("server") / "log")
    yield server
    assert server.alive
    assert server.stop() == 0
    assert server.complaints() == ""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., NumpyServer]]:
    """Starts servers with settings of their own, and stops those that a test leaves running."""
    servers: list[NumpyServer] = []

    def start(**settings: Any) -> NumpyServer:
        servers.append(NumpyServer(tmp_path / f"log{len(servers)}", **settings))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
