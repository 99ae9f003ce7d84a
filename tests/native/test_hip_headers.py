"""What we know of HIP against the real libamdhip64 and its headers (Debian: libamdhip64-dev).

A program that is compiled against the headers prints what every function takes, how large structs
are and what constants are; ctypes must think the same. It includes our native parts' own types,
which must be laid out alike. No GPU is needed.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eclip.errors import DeviceError
from eclip.files import store
from eclip.hip.api import (
    CAPTURE_RELAXED,
    CAPTURE_THREAD_LOCAL,
    ENTRY_POINTS,
    LEAST,
    LIBRARIES,
    NODE_EMPTY,
    NODE_KERNEL,
    NODE_MEMSET,
    STATUSES,
    Dim3,
    EntryPoint,
    Hip,
    KernelNodeParams,
    MemsetParams,
    Uuid,
)
from hip_list import read_hooks, read_known
from logs import make_mix, make_plan
from native_build import Native
from waiting import PATIENCE_S

HEADER = Path("/usr/include/hip/hip_runtime_api.h")
LIBRARY = LIBRARIES[2]  # 5.2
VERSION = 5, 2
NATIVE = Path(__file__).parents[2] / "native" / "hip"
# What headers call our constants and structs.
ENUMERATORS = {
    "hipStreamCaptureModeThreadLocal": CAPTURE_THREAD_LOCAL,
    "hipStreamCaptureModeRelaxed": CAPTURE_RELAXED,
    "hipGraphNodeTypeKernel": NODE_KERNEL,
    "hipGraphNodeTypeMemset": NODE_MEMSET,
    "hipGraphNodeTypeEmpty": NODE_EMPTY,
}
STRUCTS: dict[str, type[ctypes.Structure]] = {
    "dim3": Dim3,
    "hipUUID": Uuid,
    "hipKernelNodeParams": KernelNodeParams,
    "hipMemsetParams": MemsetParams,
}
# Of the structs that our native parts have definitions of their own of.
FIELDS = {
    "hipKernelNodeParams": ("extra", "func", "gridDim", "kernelParams", "sharedMemBytes"),
    "hipMemsetParams": ("elementSize", "height", "pitch", "value", "width"),
}


def _missing() -> str | None:
    if not HEADER.exists():
        return "HIP's headers are not installed: apt-get install libamdhip64-dev"
    if shutil.which("g++") is None:
        return "g++ is missing"
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return f"{LIBRARY} is not installed: apt-get install libamdhip64-5"
    return None


pytestmark = pytest.mark.skipif(_missing() is not None, reason=_missing() or "")

_PROGRAM = """
#define __HIP_PLATFORM_AMD__
#include <hip/hip_runtime_api.h>
#include <hip/hip_ext.h>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <type_traits>
namespace ours {
#include "abi.h"
}
%s
template <class T> std::string kind() {
    if (std::is_pointer_v<T>) return "p8";
    if (std::is_enum_v<T> || std::is_signed_v<T>) return "i" + std::to_string(sizeof(T));
    return "u" + std::to_string(sizeof(T));
}
template <class R, class... A> std::string takes(R (*)(A...)) {
    std::string all = kind<R>();
    ((all += " " + kind<A>()), ...);
    return all;
}
int main() {
%s
}
"""


def since(entry: EntryPoint) -> tuple[int, ...]:
    return tuple(map(int, entry.since.split(".")))


OLD = {name: entry for name, entry in ENTRY_POINTS.items() if since(entry) <= VERSION}
HOOKS = {hook.symbol: hook for hook in read_hooks().values() if hook.since <= 502}
# Templates of the same names are in the way of asking what these take.
OVERLOADED = {
    *("hipLaunchCooperativeKernel", "hipMallocAsync", "hipMallocFromPoolAsync"),
    *("hipMemcpyToSymbol", "hipMemcpyToSymbolAsync"),
    *("hipMemcpyFromSymbol", "hipMemcpyFromSymbolAsync"),
}
ASKED = [symbol for symbol in HOOKS if symbol not in OVERLOADED]
# Launches that libeclip knowingly does not know: they end planning.
UNKNOWN = {
    "hipExtLaunchMultiKernelMultiDevice",
    "hipLaunchByPtr",
    "hipLaunchCooperativeKernelMultiDevice",
    "_ZN8hip_impl22hipLaunchKernelGGLImplEmRK4dim3S2_jP12ihipStream_tPPv",
}


def in_source(symbol: str) -> str:
    """hipExtModuleLaunchKernel for the name that it has in C++."""
    found = re.match(r"_Z(\d+)(\w+)", symbol)
    return found[2][: int(found[1])] if found else symbol


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("headers")
    same = [
        f"static_assert(offsetof({struct}, {field}) == offsetof(ours::{struct}, {field}));"
        for struct, fields in FIELDS.items()
        for field in fields
    ]
    lines = [f'std::printf("{name}=%s\\n", takes(&{name}).c_str());' for name in OLD]
    lines += [
        f'std::printf("hook {symbol}=%s\\n", takes(&{in_source(symbol)}).c_str());'
        for symbol in ASKED
    ]
    lines += [f'std::printf("{name}=%zu\\n", sizeof({name}));' for name in STRUCTS]
    lines += [f'std::printf("{name}=%d\\n", int({name}));' for name in (*ENUMERATORS, *STATUSES)]
    (folder / "ask.cpp").write_text(_PROGRAM % ("\n".join(same), "\n".join(lines)))
    # Only their types are asked for, so the library is not needed to link.
    command = ["g++", "-std=c++20", "-w", f"-I{NATIVE}", "-Wl,--unresolved-symbols=ignore-all"]
    subprocess.run([*command, "ask.cpp", "-o", "ask"], cwd=folder, check=True, timeout=PATIENCE_S)
    out = subprocess.run(
        ["./ask"], cwd=folder, check=True, capture_output=True, text=True, timeout=PATIENCE_S
    )
    return dict(line.split("=") for line in out.stdout.splitlines())


def kind(given: type[ctypes._SimpleCData[object]]) -> str:
    """As the program prints it."""
    if issubclass(given, ctypes._Pointer) or given in (ctypes.c_void_p, ctypes.c_char_p):
        return "p8"
    signed = given(-1).value == -1
    return f"{'i' if signed else 'u'}{ctypes.sizeof(given)}"


@pytest.mark.parametrize("name", OLD)
def test_function_takes_what_our_table_says(printed: dict[str, str], name: str) -> None:
    entry = OLD[name]
    assert printed[name] == " ".join(map(kind, (entry.gives, *entry.takes)))


def test_structs_and_constants_are_as_we_think(printed: dict[str, str]) -> None:
    for name, struct in STRUCTS.items():
        assert int(printed[name]) == ctypes.sizeof(struct), name
    for name, value in (ENUMERATORS | STATUSES).items():
        assert int(printed[name]) == value, name


def test_functions_came_with_the_version_that_our_table_names() -> None:
    """The library's symbols have a node for every version of ROCm."""
    library = ctypes.CDLL(LIBRARY)
    find = ctypes.CDLL(None).dlvsym
    find.argtypes, find.restype = (
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p],
        ctypes.c_void_p,
    )
    for name, entry in OLD.items():
        assert find(library._handle, name.encode(), f"hip_{entry.since}".encode()), name
    newer = ENTRY_POINTS.keys() - OLD.keys()
    assert newer and not any(hasattr(library, name) for name in newer)
    assert VERSION == LEAST


def exported() -> dict[str, str]:
    """Every function of the library, and the version that it came with."""
    done = subprocess.run(
        ["nm", "-D", "--defined-only", f"/usr/lib/x86_64-linux-gnu/{LIBRARY}"],
        capture_output=True,
        text=True,
        check=True,
    )
    words = [line.split() for line in done.stdout.splitlines()]
    return dict(name.split("@@") for _, kind, name in words if kind in "TW" and "@@" in name)


@pytest.mark.parametrize("symbol", ASKED)
def test_hook_takes_what_it_stands_in_front_of(printed: dict[str, str], symbol: str) -> None:
    assert printed[f"hook {symbol}"] == " ".join(("i4", *HOOKS[symbol].takes))


def test_every_hook_is_in_the_library_since_the_version_that_it_names() -> None:
    versions = exported()
    for symbol, hook in read_hooks().items():
        if hook.since > 502:
            assert symbol not in versions
        else:
            assert versions[symbol] == f"hip_{hook.since // 100}.{hook.since % 100}"


def test_every_function_of_the_library_is_hooked_or_known() -> None:
    functions = {name for name in exported() if re.match(r"hip[A-Z]|_Z\d+hip|_ZN8hip_impl", name)}
    assert len(functions) > 350
    assert functions - read_hooks().keys() - read_known() == UNKNOWN
    assert not read_hooks().keys() & read_known()


def test_calls_fail_alike_with_libeclip_in_front_of_the_real_library(native: Native) -> None:
    """Without a GPU nothing else can be seen: that nothing crashes, and no status changes."""
    if Path("/dev/kfd").exists():
        pytest.skip("this host has an AMD GPU")
    script = (
        f"import ctypes; hip = ctypes.CDLL({LIBRARY!r}); p = ctypes.c_void_p();"
        "print([hip.hipInit(0), hip.hipStreamCreate(ctypes.byref(p)), hip.hipDeviceSynchronize(),"
        " hip.hipStreamSynchronize(None), hip.hipMalloc(ctypes.byref(p), 8), hip.hipGetLastError(),"
        " hip.hipMemset(None, 0, 8), hip.hipEventQuery(None), hip.hipStreamQuery(None)])"
    )
    seen = []
    for library in ("", str(native.hip_library)):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "LD_PRELOAD": library, "ECLIP_TIER": "background"},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        seen.append(done.stdout)
    assert seen[0] == seen[1]
    assert "[0," not in seen[0]


def test_a_host_without_an_amd_gpu_says_so_in_one_line(tmp_path: Path) -> None:
    """In a process of its own: HIP starts threads."""
    if Path("/dev/kfd").exists():
        pytest.skip("this host has an AMD GPU")
    environment = {**os.environ, "COLUMNS": "300"}
    store.save(make_plan("eclip", make_mix(1), (48,)), tmp_path / "plan.json")
    for arguments in (
        ("doctor", "--device", "hip"),
        ("demo", "--device", "hip:1"),
        ("run", str(tmp_path / "plan.json"), "--device", "hip"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "eclip", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 1, done.stderr
        said = [line for line in (done.stdout + done.stderr).splitlines() if "no AMD GPU" in line]
        assert len(said) == 1
        assert "Traceback" not in done.stderr
        if arguments[0] != "doctor":
            assert len(done.stderr.splitlines()) == 1


def test_a_library_that_is_too_old_or_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="no AMD GPU: libamdhip64 is not installed"):
        Hip(tmp_path / "libamdhip64.so.9")
    with pytest.raises(DeviceError, match="has no hipInit, which came with ROCm"):
        Hip(Path("libc.so.6"))


def test_kernels_of_the_tests_on_a_real_gpu_compile_without_one() -> None:
    """For the GPU of the paper, by the library's own compiler."""
    script = f"import hip_chains, ctypes; hip_chains._compile(ctypes.CDLL({LIBRARY!r}), 'gfx906')"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
