// Cases of kernels' names, which the driver is asked for once.
#include "cases.h"

using namespace cases;

extern "C" {
int standin_names_asked();
CUresult cuLibraryLoadData(CUlibrary*, const void*, void*, void*, unsigned, void*, void*, unsigned);
CUresult cuLibraryGetKernel(CUkernel*, CUlibrary, const char*);
CUresult cuLibraryUnload(CUlibrary);
}

namespace {

struct Library {
    explicit Library(int kernels) {
        CHECK(cuLibraryLoadData(&handle, nullptr, nullptr, nullptr, 0, nullptr, nullptr, 0));
        for (int index = 0; index < kernels; ++index) {
            CUkernel kernel;
            CHECK(cuLibraryGetKernel(&kernel, handle, std::to_string(index).c_str()));
            functions.push_back(reinterpret_cast<CUfunction>(kernel));
        }
    }
    void launch_all(CUstream stream) const {
        for (CUfunction function : functions) CHECK(launch(function, stream, {}));
    }
    CUlibrary handle = nullptr;
    std::vector<CUfunction> functions;
};

}  // namespace

CASE(names_are_asked_for_once) {
    use_plan();
    start();
    CUstream stream = make_stream();
    constexpr int kMany = 400;
    Library many(kMany), other(1);
    auto asked = [](int wanted) {
        return same("names asked for", standin_names_asked(), preloaded() ? wanted : 0);
    };
    for (int round = 0; round < 3; ++round) {
        many.launch_all(stream);
        other.launch_all(stream);
    }
    if (!asked(kMany + 1)) return false;
    CUdeviceptr memory;
    CHECK(cuMemAlloc_v2(&memory, 8));
    CHECK(cuMemFree_v2(memory));
    many.launch_all(stream);
    if (!asked(kMany + 1)) return false;
    CHECK(cuLibraryUnload(other.handle));
    many.launch_all(stream);
    if (!asked(kMany + 1)) return false;
    other.launch_all(stream);  // as if another kernel had been given the handle
    CHECK(cuStreamSynchronize(stream));
    return asked(kMany + 2);
}

// Shapes that never repeat must not be remembered for ever.
CASE(shapes_without_end) {
    use_plan();
    start();
    CUstream stream = make_stream();
    Library one(1);
    for (unsigned grid = 1; grid <= 70000; ++grid) {
        CHECK(cuLaunchKernel(one.functions[0], grid, 1, 1, 1, 1, 1, 0, stream, nullptr, nullptr));
        if (grid % 1000 == 0) CHECK(cuStreamSynchronize(stream));
    }
    return same("names asked for", standin_names_asked(), preloaded() ? 70000 : 0);
}
