// Cases of how programs find entry points, and of those that libeclip does not know.
#include "cases.h"

using namespace cases;

namespace {

using Copy = CUresult (*)(CUdeviceptr, CUdeviceptr, size_t, CUstream);
using NewCopy = CUresult (*)(CUdeviceptr, CUdeviceptr, size_t, void*, CUstream);

// A slow kernel, then a copy of what it wrote, on one stream.
template <class Call>
bool copied_after(Call&& copy) {
    uint64_t* cells = make_cells(2);
    CUstream stream = make_stream();
    CHECK(launch(make_add("a"), stream, {address(cells), 7, 20000}));
    CHECK(copy(address(cells + 1), address(cells), stream));
    CHECK(cuStreamSynchronize(stream));
    return same("what was copied", cells[1], uint64_t{7});
}

template <class Function>
Function find_by_name(const char* name) {
    void* found = dlsym(dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD), name);
    return reinterpret_cast<Function>(found);
}

template <class Function>
Function ask_for(const char* name, int version) {
    void* found = nullptr;
    CHECK(cuGetProcAddress_v2(name, &found, version, 0, nullptr));
    return reinterpret_cast<Function>(found);
}

}  // namespace

CASE(unknown_call_linked) {
    use_plan();
    start();
    return copied_after([](CUdeviceptr target, CUdeviceptr source, CUstream stream) {
        return cuMemcpyWithAttributesAsync(target, source, 8, nullptr, stream);
    });
}

CASE(unknown_call_by_dlsym) {
    use_plan();
    start();
    auto copy = find_by_name<NewCopy>("cuMemcpyWithAttributesAsync");
    return copied_after([&](CUdeviceptr target, CUdeviceptr source, CUstream stream) {
        return copy(target, source, 8, nullptr, stream);
    });
}

CASE(unknown_call_by_version) {
    use_plan();
    start();
    auto copy = ask_for<NewCopy>("cuMemcpyWithAttributesAsync", 13020);
    return copied_after([&](CUdeviceptr target, CUdeviceptr source, CUstream stream) {
        return copy(target, source, 8, nullptr, stream);
    });
}

// Only the first call ends planning; having been asked for does not.
CASE(unknown_call_that_is_only_looked_for) {
    use_plan();
    start();
    uint64_t seen[2];
    CUfunction kernel = standin_function("a", run_where, 1, 1);
    CUstream stream = make_stream();
    auto copy = find_by_name<NewCopy>("cuMemcpyWithAttributesAsync");
    CHECK(launch(kernel, stream, {address(&seen[0])}));
    uint64_t* cells = make_cells(2);
    CHECK(copy(address(cells), address(cells + 1), 8, nullptr, stream));
    CHECK(launch(kernel, stream, {address(&seen[1])}));
    CHECK(cuStreamSynchronize(stream));
    return same("the slices before the call", seen[0], preloaded() ? uint64_t{1} : kWhole) &&
           same("the slices after it", seen[1], kWhole);
}

// On every stream the call may be for, and with work on all of them.
CASE(unknown_call_after_work_on_other_streams) {
    use_plan({{0, 1}, {1, 2}, {2, 4}}, {{{"a", 0}}, {{"b", 1}}, {{"c", 2}}});
    start();
    uint64_t* cells = make_cells(6);
    CUstream blocking = make_stream(true), other = make_stream();
    CHECK(launch(make_add("a"), nullptr, {address(cells), 7, 20000}));
    CHECK(launch(make_add("b"), blocking, {address(cells + 1), 8, 20000}));
    CHECK(launch(make_add("c"), other, {address(cells + 2), 9, 20000}));
    CHECK(cuMemcpyWithAttributesAsync(address(cells + 3), address(cells), 16, nullptr, nullptr));
    CHECK(cuMemcpyWithAttributesAsync(address(cells + 5), address(cells + 2), 8, nullptr, other));
    CHECK(cuCtxSynchronize());
    return same("what was copied of the default stream", cells[3], uint64_t{7}) &&
           same("of the blocking stream", cells[4], uint64_t{8}) &&
           same("of the other", cells[5], uint64_t{9});
}

CASE(unknown_call_in_the_default_stream) {
    use_plan();
    start();
    uint64_t* cells = make_cells(2);
    CHECK(launch(make_add("a"), nullptr, {address(cells), 7, 20000}));
    CHECK(cuMemcpyWithAttributesAsync(address(cells + 1), address(cells), 8, nullptr, nullptr));
    CHECK(cuStreamSynchronize(nullptr));
    return same("what was copied", cells[1], uint64_t{7});
}

CASE(unknown_call_with_many_arguments) {
    use_plan();
    start();
    using Leap = CUresult (*)(CUdeviceptr, uint64_t, uint64_t, double, uint64_t, uint64_t, uint64_t,
                              uint64_t, uint64_t, CUstream);
    auto leap = ask_for<Leap>("cuLeapAsync", 13020);
    uint64_t* cells = make_cells(1);
    CUstream stream = make_stream();
    CHECK(leap(address(cells), 1, 2, 1.5, 4, 8, 16, 32, 64, stream));
    CHECK(cuStreamSynchronize(stream));
    return same("the sum of the arguments", cells[0], uint64_t{130});
}

CASE(deeply_bound_library) {
    use_plan();
    start();
    Dl_info self;
    dladdr(reinterpret_cast<void*>(&deeply_bound_library_case), &self);
    std::string folder(self.dli_fname, strrchr(self.dli_fname, '/') + 1 - self.dli_fname);
    void* library = dlopen((folder + "libdeepbound.so").c_str(), RTLD_LAZY | RTLD_DEEPBIND);
    if (library == nullptr) return same("the library", 0, 1);
    auto copy = reinterpret_cast<Copy>(dlsym(library, "deepbound_copy"));
    return copied_after([&](CUdeviceptr target, CUdeviceptr source, CUstream stream) {
        return copy(target, source, 8, stream);
    });
}

// The newest interface of a name that libeclip has in an older one, with an argument more.
CASE(newer_interface_of_a_known_name) {
    use_plan();
    start();
    using HostFunction = CUresult (*)(CUstream, void (*)(void*), void*, unsigned);
    auto call = ask_for<HostFunction>("cuLaunchHostFunc", 13020);
    CUstream stream = make_stream();
    static uint64_t* cells = make_cells(2);
    CHECK(launch(make_add("a"), stream, {address(cells), 7, 20000}));
    CHECK(call(stream, [](void*) { cells[1] = cells[0]; }, nullptr, 1));
    CHECK(cuStreamSynchronize(stream));
    return same("the last argument", standin_sync_mode(), 1) &&
           same("what the host saw", cells[1], uint64_t{7});
}

// An answer that libeclip knows is its hook, whichever version is asked for.
CASE(older_interface_of_a_known_name) {
    use_plan();
    start();
    auto copy = ask_for<Copy>("cuMemcpyDtoDAsync", 13020);
    return copied_after([&](CUdeviceptr target, CUdeviceptr source, CUstream stream) {
        return copy(target, source, 8, stream);
    });
}

// With another library preloaded, behind libeclip or before it: both do what they are for.
CASE(launches_that_another_library_watches) {
    use_plan();
    start();
    auto watched = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "watcher_calls"));
    CUfunction kernel = standin_function("a", run_where, 1, 1);
    CUstream stream = make_stream();
    uint64_t seen = 0;
    for (int time = 0; time < 3; ++time) CHECK(launch(kernel, stream, {address(&seen)}));
    auto asked = ask_for<decltype(&cuLaunchKernel)>("cuLaunchKernel", 12000);
    uint64_t argument = address(&seen);
    void* params[1] = {&argument};
    CHECK(asked(kernel, 1, 1, 1, 1, 1, 1, 0, stream, params, nullptr));
    CHECK(cuStreamSynchronize(stream));
    // What is asked for by version is the driver's own, which only libeclip leads on to the other.
    return same("whether launches were watched", watched == nullptr || watched() >= 3, true) &&
           same("where the last ran", seen, preloaded() ? uint64_t{1} : kWhole);
}
