// Functions' names, by their hashes: what the table knows kernels by.
#pragma once

#include <atomic>
#include <cstdint>

#include "cuda_abi.h"

namespace eclip {

constexpr int kNameCache = 256;

struct NameEntry {
    CUfunction function;
    uint64_t hash;
    uint64_t epoch;
};

class Names {
public:
    uint64_t hash_of(CUfunction function);
    void forget() { epoch_.fetch_add(1); }

private:
    std::atomic<uint64_t> epoch_{0};
};

// The driver's name of a function or kernel, "" if it has none.
const char* function_name(CUfunction function);

}  // namespace eclip
