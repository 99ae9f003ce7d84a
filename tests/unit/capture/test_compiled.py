"""Binaries of compiled modules' kernels are found among the launchers that live in the process."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eclip.capture import compiled
from eclip.capture.compiled import Binaries, Binary

GPU = 2


class CompiledKernel:
    """As Triton's: keeps the binary; ``function`` is None until it is loaded."""

    def __init__(self, function: int | None, asm: dict[str, bytes]) -> None:
        self.function = function
        self.asm = asm
        self.metadata = types.SimpleNamespace(name="triton_add")


class StaticallyLaunchedCudaKernel:
    """As Inductor's: has forgotten its binary, and says by its hash where it was."""

    def __init__(self, function: int | None, key: str) -> None:
        self.function = function
        self.hash = key
        self.name = "triton_mul"


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    def put(name: str, **contents: Any) -> None:
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)

    for package in ("torch", "torch._inductor", "torch._inductor.runtime"):
        put(package, __path__=[])
    put("triton.compiler.compiler", CompiledKernel=CompiledKernel)
    put(
        "torch._inductor.runtime.static_triton_launcher",
        StaticallyLaunchedCudaKernel=StaticallyLaunchedCudaKernel,
    )
    put(
        "torch._inductor.runtime.cache_dir_utils",
        triton_cache_dir=lambda device: str(tmp_path / str(device)),
    )
    put("torch._inductor.runtime.runtime_utils", triton_hash_to_path_key=str.upper)
    folder = tmp_path / str(GPU) / "ABC"
    folder.mkdir(parents=True)
    yield folder


def test_binaries_of_live_launchers_are_found_by_their_function(cache: Path) -> None:
    (cache / "triton_mul.cubin").write_bytes(b"mul")
    alive = [
        CompiledKernel(11, {"cubin": b"add", "ptx": b""}),
        CompiledKernel(None, {"cubin": b"not loaded"}),
        CompiledKernel(12, {"hsaco": b"another vendor's"}),
        StaticallyLaunchedCudaKernel(13, "abc"),
        StaticallyLaunchedCudaKernel(None, "abc"),
        StaticallyLaunchedCudaKernel(14, "gone"),
    ]
    found = dict(compiled._loaded_binaries(GPU))
    assert found == {11: Binary("triton_add", b"add"), 13: Binary("triton_mul", b"mul")}
    assert alive


def test_a_function_is_loaded_once_with_its_shared_memory_and_unloaded_with_its_owner(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[Any, ...]] = []

    def call(function: str, *arguments: Any) -> Any:
        said.append((function, *arguments))
        return {
            "cuLibraryLoadData": 70,
            "cuLibraryGetKernel": 71,
            "cuFuncGetAttribute": 99_000,
            "cuDeviceGet": 5,
        }.get(function)

    class Driver:
        CUfunction_attribute = types.SimpleNamespace(
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared"
        )

        def __getattr__(self, name: str) -> str:
            return name

    monkeypatch.setattr(compiled, "cu", Driver())
    monkeypatch.setattr(compiled, "call", call)
    alive = CompiledKernel(21, {"cubin": b"add"})
    binaries = Binaries(GPU)
    assert binaries.kernel_of(21) == binaries.kernel_of(21) == 71
    assert binaries.kernel_of(22) is None
    loads = [words for words in said if words[0] == "cuLibraryLoadData"]
    assert [words[1] for words in loads] == [b"add"]
    assert ("cuLibraryGetKernel", 70, b"triton_add") in said
    assert ("cuKernelSetAttribute", "shared", 99_000, 71, 5) in said
    del binaries, alive
    assert said[-1] == ("cuLibraryUnload", 70)


def test_without_compiled_modules_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (compiled._TRITON, *compiled._STATIC):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert dict(compiled._loaded_binaries(GPU)) == {}
