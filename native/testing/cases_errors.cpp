// Cases of errors: of lanes, of drivers that lack something, and of the program itself.
#include "cases.h"

using namespace cases;

CASE(lane_that_refuses) {
    use_plan();
    start();
    uint64_t* cells = make_cells(2);
    CUstream stream = make_stream();
    CUfunction first = make_add("a"), second = make_add("b");
    for (CUresult status : {CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_INVALID_VALUE,
                            CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_CLUSTER_SIZE, 98, 209, 999}) {
        standin_refuse(CUDA_SUCCESS);
        CHECK(launch(first, stream, {address(cells), 1, 1000}));
        standin_refuse(status);
        CHECK(cuMemsetD32Async(address(cells + 1), 0, 2, stream));
        CHECK(launch(second, stream, {address(cells), 1, 0}));
        CHECK(cuStreamSynchronize(stream));
    }
    return same("the cell", cells[0], uint64_t{14});
}

// What home refuses too, the program is told.
CASE(launch_that_is_wrong) {
    use_plan();
    start();
    CUstream stream = make_stream();
    return same("the status", cuLaunchKernel(nullptr, 1, 1, 1, 1, 1, 1, 0, stream, nullptr, nullptr),
                CUDA_ERROR_INVALID_HANDLE);
}

CASE(launch_whose_attributes_are_missing) {
    use_plan();
    start();
    uint64_t* cells = make_cells(1);
    CUstream stream = make_stream();
    CUlaunchConfig config{{1, 1, 1}, {1, 1, 1}, 0, stream, nullptr, 1};
    uint64_t values[3] = {address(cells), 7, 0};
    void* params[3] = {values, values + 1, values + 2};
    CHECK(cuLaunchKernelEx(&config, make_add("a"), params, nullptr));
    CHECK(cuStreamSynchronize(stream));
    return same("the cell", cells[0], uint64_t{7});
}

// What the driver does not have is not there, though libeclip has a hook for it.
CASE(function_that_the_driver_lacks) {
    use_plan();
    start();
    make_stream();
    void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    void* asked = nullptr;
    cuGetProcAddress_v2("cuMemBatchDecompressAsync", &asked, 13000, 0, nullptr);
    bool found = dlsym(RTLD_DEFAULT, "cuMemBatchDecompressAsync") != nullptr;
    bool message = dlerror() != nullptr;
    return same("whether it is found", found, false) && same("whether dlerror() says so", message, true) &&
           same("whether it is in the library", dlsym(driver, "cuMemcpyBatchAsync_v2") != nullptr, false) &&
           same("whether it is the answer", asked != nullptr, false);
}
