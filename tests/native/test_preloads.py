"""What broke other preloads (docs/guides/preload.md): each as a program, also under libeclip.

Drivers are stand-ins, some behind a library that forwards to them. A program must say the same
with libeclip as without, in every tier, and libeclip must have been at work where it can be.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import forwarding
from native_build import Native
from two_programs import Service
from waiting import PATIENCE_S

TIERS: list[dict[str, str]] = [
    {"ECLIP_TIER": "background"},
    {"ECLIP_TIER": "service"},
    {"ECLIP_TIER": "background", "ECLIP_DISABLE": "1"},
]
PROGRAMS = 60

DECLARED = """
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef uint64_t u64;
int cuInit(unsigned), cuDevicePrimaryCtxRetain(u64*, int), cuCtxSetCurrent(u64);
int cuStreamCreate(u64*, unsigned), cuStreamSynchronize(u64), cuMemAlloc_v2(u64*, u64);
int cuMemsetD32Async(u64, unsigned, u64, u64), cuMemcpyDtoH_v2(void*, u64, u64);
int cuMemcpyDtoDAsync_v2(u64, u64, u64, u64);
int cuLaunchKernel(u64, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, u64,
                   void**, void**);
u64 standin_function(const char*, void (*)(const u64*), int, int);
#define CHECK(call) \\
    do { \\
        int status = (call); \\
        if (status) printf("%s: %d\\n", #call, status), exit(1); \\
    } while (0)
static void begin(void) {
    u64 context;
    CHECK(cuInit(0));
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(cuCtxSetCurrent(context));
}
"""


def run(program: list[object], folder: Path, native: Native, **variables: str) -> str:
    """What a program says; it must end well. A folder's own driver comes before the stand-in."""
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": f"{folder}:{native.folder / 'plain'}",
        "ECLIP_BOARD": str(folder / "board"),
        **variables,
    }
    done = subprocess.run(
        [str(word) for word in program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def same_under_libeclip(program: list[object], folder: Path, native: Native) -> str:
    alone = run(program, folder, native)
    for tier in TIERS:
        assert run(program, folder, native, LD_PRELOAD=str(native.library), **tier) == alone, tier
    return alone


def linked(folder: Path, name: str, source: str, native: Native) -> Path:
    driver = next(
        path / "libcuda.so.1"
        for path in (folder, native.folder / "plain")
        if (path / "libcuda.so.1").exists()
    )
    return forwarding.compiled(folder, name, DECLARED + source, [str(driver)])


# --- 1. Captured graphs of many sizes, beside eager work ------------------------------------------

GRAPHS = """
int cuStreamBeginCapture_v2(u64, int), cuStreamEndCapture(u64, u64*), cuGraphLaunch(u64, u64);
int cuGraphInstantiateWithFlags(u64*, u64, u64), cuStreamWaitEvent(u64, u64, unsigned);
int cuEventCreate(u64*, unsigned), cuEventRecord(u64, u64);
enum { SIZES = 35, KERNELS = 12, ROUNDS = 400 };
static u64 eager_cell, cells;
static void add(const u64* given) { *(u64*)given[0] += given[1]; }
static void launch(u64 function, u64 stream, u64 cell, u64 value) {
    void* given[] = {&cell, &value};
    CHECK(cuLaunchKernel(function, 8, 1, 1, 128, 1, 1, 0, stream, given, NULL));
}
static void* eager(void* nothing) {
    u64 stream;
    begin();
    CHECK(cuStreamCreate(&stream, 1));
    for (int round = 0; round < ROUNDS; ++round)
        launch(standin_function("eager", add, 2, 1), stream, eager_cell, 1);
    CHECK(cuStreamSynchronize(stream));
    return NULL;
}
int main(void) {
    u64 capture, side, replay, event, graph, exec[SIZES], sum = 0, counted = 0;
    begin();
    CHECK(cuMemAlloc_v2(&cells, 8 * SIZES));
    CHECK(cuMemAlloc_v2(&eager_cell, 8));
    CHECK(cuStreamCreate(&capture, 1));
    CHECK(cuStreamCreate(&side, 1));
    CHECK(cuStreamCreate(&replay, 1));
    CHECK(cuEventCreate(&event, 2));
    u64 function = standin_function("decode", add, 2, 1);
    pthread_t other;
    pthread_create(&other, NULL, eager, NULL);
    for (int size = SIZES - 1; size >= 0; --size) {  // the largest first, as vLLM does
        CHECK(cuStreamBeginCapture_v2(capture, 1));  // of this thread only
        for (int kernel = 0; kernel < KERNELS; ++kernel) {
            launch(function, capture, cells + 8 * size, size + 1);
            if (kernel == 4) {  // a branch, and its join
                CHECK(cuEventRecord(event, capture));
                CHECK(cuStreamWaitEvent(side, event, 0));
                launch(function, side, cells + 8 * size, 1000);
                CHECK(cuEventRecord(event, side));
                CHECK(cuStreamWaitEvent(capture, event, 0));
            }
        }
        CHECK(cuStreamEndCapture(capture, &graph));
        CHECK(cuGraphInstantiateWithFlags(&exec[size], graph, 0));
    }
    srand(1);
    for (int round = 0; round < ROUNDS; ++round) CHECK(cuGraphLaunch(exec[rand() % SIZES], replay));
    CHECK(cuStreamSynchronize(replay));
    pthread_join(other, NULL);
    for (int size = 0; size < SIZES; ++size) {
        u64 value;
        CHECK(cuMemcpyDtoH_v2(&value, cells + 8 * size, 8));
        printf("%lu ", value);
    }
    CHECK(cuMemcpyDtoH_v2(&counted, eager_cell, 8));
    printf("%lu\\n", counted);
}
"""


def test_graphs_of_many_sizes_beside_eager_work(native: Native, tmp_path: Path) -> None:
    program = linked(tmp_path, "graphs", GRAPHS, native)
    said = same_under_libeclip([program], tmp_path, native)
    *graphs, eager = map(int, said.split())
    assert eager == 400
    replays = [value // (12 * (size + 1) + 1000) for size, value in enumerate(graphs)]
    assert sum(replays) == 400


# --- 2. NCCL, loaded by ctypes --------------------------------------------------------------------

# Finds the driver by itself, and its ranks wait for each other inside a kernel.
NCCL = """
#include <unistd.h>
static void* found(void* driver, const char* name) {
    int (*ask)(const char*, void**, int, u64, int*) = dlsym(driver, "cuGetProcAddress_v2");
    void* function = NULL;
    CHECK(ask(name, &function, 12000, 0, NULL));
    return function;
}
static void meet(const u64* given) {
    __atomic_add_fetch((u64*)given[0], 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n((u64*)given[0], __ATOMIC_SEQ_CST) < 2) usleep(100);
}
int ncclCommInitRank(u64* met) {
    void* driver = dlopen("libcuda.so.1", RTLD_LAZY);
    int (*start)(unsigned) = dlsym(driver, "cuInit");
    int (*create)(u64*, unsigned) = found(driver, "cuStreamCreate");
    int (*launch)(u64, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, u64,
                  void**, void**) = found(driver, "cuLaunchKernel");
    int (*wait)(u64) = found(driver, "cuStreamSynchronize");
    u64 (*make)(const char*, void (*)(const u64*), int, int) = dlsym(driver, "standin_function");
    u64 stream, context, counter = (u64)met;
    void* given[] = {&counter};
    CHECK(start(0));
    CHECK(((int (*)(u64*, int))dlsym(driver, "cuDevicePrimaryCtxRetain"))(&context, 0));
    CHECK(((int (*)(u64))dlsym(driver, "cuCtxSetCurrent"))(context));
    CHECK(create(&stream, 1));
    u64 kernel = make("ncclDevKernel_AllReduce", meet, 1, 1);
    CHECK(launch(kernel, 1, 1, 1, 1, 1, 1, 0, stream, given, 0));
    return wait(stream);
}
"""
RANKS = """
import ctypes, sys, threading
met = ctypes.c_uint64()
nccl = ctypes.CDLL(sys.argv[1])
ranks = [threading.Thread(target=lambda: nccl.ncclCommInitRank(ctypes.byref(met)), daemon=True)
         for _ in range(2)]
for rank in ranks: rank.start()
for rank in ranks: rank.join()
print(met.value)
"""


def test_nccl_loaded_by_ctypes_is_not_held_while_its_ranks_wait_for_each_other(
    native: Native, tmp_path: Path, service: Service
) -> None:
    library = forwarding.compiled(tmp_path, "libnccl.so.2", DECLARED + NCCL, ["-shared"])
    service.raise_busy()  # background that is not NCCL's would wait for its end
    program = [sys.executable, "-c", RANKS, library]
    assert same_under_libeclip(program, tmp_path, native) == "2\n"


# --- 3 and 4. Calls that must arrive with their own arguments: memory of NCCL's, peers ------------

ASKED = {
    "cuMemCreate": """
int cuMemCreate(uint64_t* handle, uint64_t bytes, const int* given, uint64_t flags) {
    *handle = bytes + 1;
    printf("create %lu %d %lu\\n", bytes, given[2], flags);
    return 0;
}""",
    "cuDeviceCanAccessPeer": """
int cuDeviceCanAccessPeer(int* can, int device, int peer) {
    *can = device < peer;
    printf("peer %d %d\\n", device, peer);
    return device > 7 ? 101 : 0;
}""",
    "cuCtxEnablePeerAccess": """
int cuCtxEnablePeerAccess(uint64_t context, unsigned flags) {
    printf("enable %lu %u\\n", context, flags);
    return 704;
}""",
    "cuDeviceGetCount": "int cuDeviceGetCount(int* count) { *count = 8; return 0; }",
    "cuMulticastCreate": """
int cuMulticastCreate(uint64_t* handle, const int* given) {
    *handle = 7;
    printf("multicast %d\\n", given[0]);
    return 0;
}""",
}
ASKING = """
int cuMemCreate(u64*, u64, const int*, u64), cuDeviceCanAccessPeer(int*, int, int);
int cuCtxEnablePeerAccess(u64, unsigned), cuDeviceGetCount(int*);
int cuMulticastCreate(u64*, const int*);
static void ask(int (*create)(u64*, u64, const int*, u64), int (*peer)(int*, int, int),
                int (*enable)(u64, unsigned), int (*count)(int*), int (*cast)(u64*, const int*)) {
    int properties[8] = {1, 1, 3, 5}, can = 9, devices = 0;
    u64 handle = 0;
    CHECK(create(&handle, (u64)1 << 33, properties, 0));
    printf("%lu\\n", handle);
    CHECK(count(&devices));
    for (int device = 0; device <= devices; device += 2) {
        int status = peer(&can, device, (device + 1) % devices);
        printf("%d %d\\n", status, can);
    }
    printf("%d\\n", enable(0x1234567890, 0));
    CHECK(cast(&handle, properties));
    printf("%lu\\n", handle);
}
int main(void) {
    begin();
    ask(cuMemCreate, cuDeviceCanAccessPeer, cuCtxEnablePeerAccess, cuDeviceGetCount,
        cuMulticastCreate);
    void* driver = dlopen("libcuda.so.1", RTLD_LAZY);
    ask(dlsym(driver, "cuMemCreate"), dlsym(driver, "cuDeviceCanAccessPeer"),
        dlsym(driver, "cuCtxEnablePeerAccess"), dlsym(driver, "cuDeviceGetCount"),
        dlsym(driver, "cuMulticastCreate"));
}
"""


def test_memory_and_peers_are_asked_for_with_the_programs_own_arguments(
    native: Native, tmp_path: Path
) -> None:
    forwarding.build(tmp_path, "libcuda.so.1", relinked(native, tmp_path), ASKED)
    program = linked(tmp_path, "asking", ASKING, native)
    lines = same_under_libeclip([program], tmp_path, native).splitlines()
    assert lines[:2] == ["create 8589934592 3 0", "8589934593"]
    assert lines[2:6] == ["peer 0 1", "0 1", "peer 2 3", "0 1"]
    assert lines[10:12] == ["peer 8 1", "101 0"]
    assert lines[12:] == ["enable 78187493520 0", "704", "multicast 1", "7", *lines[:16]]


# --- 5. A hook of dlsym that finds itself ---------------------------------------------------------

LOOKS = """
typedef void* (*Look)(void*, const char*);
int %(name)s(int depth) {
    void* libc = dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD);
    void* driver = dlopen("libcuda.so.1", RTLD_LAZY);
    Look looks[] = {dlsym, dlsym(RTLD_DEFAULT, "dlsym"), dlsym(RTLD_NEXT, "dlsym"),
                    dlsym(libc, "dlsym"), dlvsym(libc, "dlsym", "GLIBC_2.2.5")};
    for (int index = 0; index < 5; ++index) {
        if (looks[index] == NULL) return 1;
        Look again = (Look)looks[index](RTLD_DEFAULT, "dlsym");
        if (again == NULL || again(driver, "cuInit") == NULL) return 2;
        if (looks[index](driver, "cuNothingOfTheKind") != NULL || dlerror() == NULL) return 3;
        if (((int (*)(unsigned))looks[index](driver, "cuInit"))(0) != 0) return 4;
        if (looks[index](libc, "printf") != dlsym(libc, "printf")) return 5;
    }
    return 0;
}
"""
LOOKING = """
static void* look(void* path) {
    long wrong = 0;
    for (int round = 0; round < 300; ++round) {
        void* library = dlopen(path, RTLD_NOW | (round %% 2 ? RTLD_LOCAL : RTLD_GLOBAL));
        wrong = wrong ? wrong : ((int (*)(int))dlsym(library, "sub"))(round);
    }
    return (void*)wrong;
}
int main(int count, char** words) {
    pthread_t threads[4];
    for (int index = 0; index < 4; ++index) pthread_create(&threads[index], NULL, look, words[1]);
    for (int index = 0; index < 4; ++index) {
        void* wrong;
        pthread_join(threads[index], &wrong);
        printf("%%ld\\n", (long)wrong);
    }
}
"""


@pytest.mark.parametrize("options", [[], ["-Wl,-z,now"]])
def test_libraries_that_look_for_dlsym_by_dlsym_find_a_function_that_looks(
    native: Native, tmp_path: Path, options: list[str]
) -> None:
    source = DECLARED + LOOKS % {"name": "sub"}
    library = forwarding.compiled(
        tmp_path, "libsub.so", "#define _GNU_SOURCE\n" + source, ["-shared", *options]
    )
    program = linked(tmp_path, "looking", LOOKING.replace("%%", "%"), native)
    assert same_under_libeclip([program, library], tmp_path, native) == "0\n" * 4


# --- 6. A driver that forwards to another library, as WSL's does ----------------------------------


def relinked(native: Native, folder: Path) -> Path:
    """The stand-in under the name that a driver behind another has."""
    parts = ("engine", "graph", "standin", "standin_contexts", "standin_graphs", "watch")
    objects = [str(native.folder / "plain" / "testing" / f"{part}.o") for part in parts]
    made = folder / "libcuda.so.1.1"
    command = ["g++", "-shared", "-Wl,-soname,libcuda.so.1.1", "-Wl,-Bsymbolic", "-o", str(made)]
    subprocess.run([*command, *objects, "-pthread", "-ldl"], check=True)
    return made


def counted(folder: Path) -> int:
    """Launches that libeclip has counted in this folder's files."""
    return sum(int(np.fromfile(path, dtype=np.uint64).sum()) for path in folder.iterdir())


def test_random_programs_on_a_driver_that_forwards_to_another(
    native: Native, tmp_path: Path
) -> None:
    forwarding.build(tmp_path, "libcuda.so.1", relinked(native, tmp_path))
    (tmp_path / "counters").mkdir()
    program = [native.folder / "plain" / "fuzz", "--seed", 3, "--programs", PROGRAMS]
    same = f"{PROGRAMS} programs, no difference\n"
    assert run(program, tmp_path, native) == same
    said = run(
        program,
        tmp_path,
        native,
        LD_PRELOAD=str(native.library),
        ECLIP_STATS=str(tmp_path / "counters"),
    )
    assert said == same
    assert counted(tmp_path / "counters") > PROGRAMS
    for tier in TIERS:
        preloaded = {"LD_PRELOAD": str(native.library), **tier}
        assert run([*program, "--unplanned", 1], tmp_path, native, **preloaded) == same


# --- 7. A library that uses the GPU while it is loaded, from a thread that it waits for -----------

TOOLKIT = """
static void* draw(void* nothing) {
    u64 stream, memory, value = 0;
    begin();
    CHECK(cuStreamCreate(&stream, 0));
    CHECK(cuMemAlloc_v2(&memory, 64));
    for (int frame = 0; frame < 50; ++frame) {
        CHECK(cuMemsetD32Async(memory, frame, 16, stream));
        CHECK(cuMemcpyDtoDAsync_v2(memory, memory + 32, 32, stream));
    }
    CHECK(cuStreamSynchronize(stream));
    CHECK(cuMemcpyDtoH_v2(&value, memory, 4));
    printf("%lu\\n", value);
    return NULL;
}
__attribute__((constructor)) static void open_window(void) {
    pthread_t thread;
    pthread_create(&thread, NULL, draw, NULL);
    pthread_join(thread, NULL);
    fflush(stdout);
}
"""


def test_a_library_that_uses_the_gpu_in_a_thread_while_it_is_loaded_does_not_hang(
    native: Native, tmp_path: Path
) -> None:
    library = linked_library(tmp_path, "libtoolkit.so", TOOLKIT, native)
    program = linked(
        tmp_path,
        "window",
        "int main(int n, char** words) { return dlopen(words[1], RTLD_NOW) == NULL; }",
        native,
    )
    assert same_under_libeclip([program, library], tmp_path, native) == "49\n"


def linked_library(folder: Path, name: str, source: str, native: Native) -> Path:
    driver = native.folder / "plain" / "libcuda.so.1"
    return forwarding.compiled(folder, name, DECLARED + source, ["-shared", str(driver)])


# --- 8. HIP's own calls of its own functions ------------------------------------------------------


def calling(name: str, other: str) -> str:
    """A function of HIP's that calls another exported one first, which a preload stands before."""
    return (
        f'extern int other_{other}(void*) __asm__("{other}");\n'
        f"int {name}(void* given) {{\n"
        f"    if (!p_{name}) find_all();\n"
        f"    other_{other}(given);\n"
        f"    return ((int (*)(void*))p_{name})(given);\n}}"
    )


def test_random_programs_on_a_hip_that_calls_its_own_functions(
    native: Native, tmp_path: Path
) -> None:
    real = Path(shutil.copy(native.folder / "hip/order/libamdhip64.so.5", tmp_path / "real.so"))
    own = {
        "hipEventSynchronize": calling("hipEventSynchronize", "hipEventQuery"),
        "hipStreamSynchronize": calling("hipStreamSynchronize", "hipStreamQuery"),
    }
    forwarding.build(tmp_path, "libamdhip64.so.5", real, own)
    (tmp_path / "counters").mkdir()
    program = [native.folder / "hip" / "fuzz", "--seed", 3, "--programs", PROGRAMS]
    same = f"{PROGRAMS} programs, no difference\n"
    assert run(program, tmp_path, native) == same
    said = run(
        program,
        tmp_path,
        native,
        LD_PRELOAD=str(native.hip_library),
        ECLIP_STATS=str(tmp_path / "counters"),
    )
    assert said == same
    assert counted(tmp_path / "counters") > PROGRAMS
