"""One server for all tests of a process: it has to survive them, and to complain about nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from numpy_server import NumpyServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NumpyServer]:
    server = NumpyServer(tmp_path_factory.mktemp("server") / "log")
    yield server
    assert server.alive
    assert server.stop() == 0
    assert server.complaints() == ""
