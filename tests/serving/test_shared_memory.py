"""Tensors in shared memory, with Triton's clients; and names that several fronts share."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException, serialize_byte_tensor, shared_memory

from eclip.server.limits import Limits
from eclip.server.messages import RefusedError
from eclip.server.shared_memory import MemoryPlace, Region, Regions
from numpy_server import NumpyServer


@contextmanager
def client_memory(byte_size: int) -> Iterator[tuple[str, Any]]:
    key = f"test{secrets.token_hex(8)}"
    handle = shared_memory.create_shared_memory_region("region", key, byte_size)
    try:
        yield key, handle
    finally:
        shared_memory.destroy_shared_memory_region(handle)


@pytest.mark.parametrize("module", [tritonclient.http, tritonclient.grpc])
def test_tensors_come_and_go_through_shared_memory(module: ModuleType, server: NumpyServer) -> None:
    address = server.http if module is tritonclient.http else server.grpc
    left = np.arange(8, dtype=np.int32).reshape(2, 4)
    right = np.full((2, 4), 100, np.int32)
    name = f"mine{secrets.token_hex(4)}"
    with module.InferenceServerClient(address) as client, client_memory(4 * 32) as (key, handle):
        shared_memory.set_shared_memory_region(handle, [left, right])
        client.register_system_shared_memory(name, key, 4 * 32)
        inputs = [module.InferInput(f"INPUT{index}", (2, 4), "INT32") for index in (0, 1)]
        outputs = [module.InferRequestedOutput(f"OUTPUT{index}") for index in (0, 1)]
        for index in (0, 1):
            inputs[index].set_shared_memory(name, 32, offset=32 * index)
        outputs[1].set_shared_memory(name, 32, offset=96)
        result = client.infer("add_sub", inputs, outputs=outputs)
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), left + right)
        written = shared_memory.get_contents_as_numpy(handle, np.int32, (2, 4), offset=96)
        np.testing.assert_array_equal(written, left - right)
        with pytest.raises(InferenceServerException, match="registered already"):
            client.register_system_shared_memory(name, key, 32)
        outputs[1].set_shared_memory(name, 31, offset=96)
        with pytest.raises(InferenceServerException, match="32 bytes; 31 are reserved"):
            client.infer("add_sub", inputs, outputs=outputs)
        client.unregister_system_shared_memory(name)
        with pytest.raises(InferenceServerException, match="no shared memory region"):
            client.infer("add_sub", inputs)


def test_texts_in_shared_memory(server: NumpyServer) -> None:
    texts = np.array([[b"one", b"two"]], object)
    module = tritonclient.http
    name = f"mine{secrets.token_hex(4)}"
    with module.InferenceServerClient(server.http) as client, client_memory(64) as (key, handle):
        shared_memory.set_shared_memory_region(handle, [serialize_byte_tensor(texts)])
        client.register_system_shared_memory(name, key, 64)
        given = module.InferInput("TEXT", (1, 2), "BYTES")
        given.set_shared_memory(name, 14)
        assert client.infer("upper", [given]).as_numpy("UPPER").tolist() == [[b"ONE", b"TWO"]]
        client.unregister_system_shared_memory(name)


def test_fronts_share_names(start: Callable[..., NumpyServer], tmp_path: Path) -> None:
    folder = tmp_path / "regions"
    folder.mkdir()
    first, second = (start(regions=str(folder)) for _ in range(2))
    module = tritonclient.http
    given = module.InferInput("IN", (1, 2), "FP32")
    given.set_shared_memory("shared", 8)
    with (
        module.InferenceServerClient(first.http) as one,
        module.InferenceServerClient(second.http) as other,
        client_memory(8) as (key, handle),
        client_memory(8) as (new_key, new_handle),
    ):
        for number, (given_key, given_handle) in enumerate([(key, handle), (new_key, new_handle)]):
            values = np.full((1, 2), number, np.float32)
            shared_memory.set_shared_memory_region(given_handle, [values])
            one.register_system_shared_memory("shared", given_key, 8)
            answer = other.infer("identity_fp32", [given]).as_numpy("OUT")
            np.testing.assert_array_equal(answer, values)
            assert other.get_system_shared_memory_status()[0]["key"] == given_key
            other.unregister_system_shared_memory("shared")
            with pytest.raises(InferenceServerException, match="no shared memory region"):
                one.infer("identity_fp32", [given])


def test_regions_of_others_do_not_keep_files_open(tmp_path: Path) -> None:
    """A front that never hears of unregistering closes what it has not used for long."""
    one = Regions(tmp_path, Limits(regions=4))
    other = Regions(tmp_path, Limits(regions=4))
    key = f"test{secrets.token_hex(8)}"
    path = Path("/dev/shm") / key
    path.write_bytes(bytes(range(8)))
    before = len(list(Path("/proc/self/fd").iterdir()))
    try:
        for number in range(20):
            one.register(Region(f"r{number}", key, 0, 8))
            assert other.read(MemoryPlace(f"r{number}", 2, 2)) == b"\x02\x03"
            one.unregister(f"r{number}")
        assert len(list(Path("/proc/self/fd").iterdir())) <= before + 4
        with pytest.raises(RefusedError, match="no shared memory region"):
            other.read(MemoryPlace("r19", 0, 1))
        other.close()
        one.close()
        assert len(list(Path("/proc/self/fd").iterdir())) == before
    finally:
        path.unlink()
