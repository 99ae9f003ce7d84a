// Launches' identities: what the table knows kernels by, remembered because a name is slow to get.
//
// One open-addressing table for all threads, by a hash of function, grid and block. Reading takes no
// lock. Who reads a slot while it changes may see another launch's identity, as may two launches of
// one hash: that costs speed, never order. A table that was outgrown is kept, as somebody may be
// reading it; all of them together are smaller than the last.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda_abi.h"
#include "stream.h"

namespace eclip {

// What the driver says of a function, or of a kernel in a function's place.
struct Named {
    const char* name = "";
    const void* owner = nullptr;  // its module or library, if the driver says
    bool of_module = false;
};
Named name_function(CUfunction function);

class Identities {
public:
    Identities() : table_(grow(kFirstSlots)) {}

    uint64_t of(const Launch& launch) {
        const uint64_t key = key_of(launch);
        const Table& table = *table_.load(std::memory_order_acquire);
        for (size_t at = key >> table.shift;; at = (at + 1) & table.mask) {
            const Slot& slot = table.slots[at];
            uint64_t seen = slot.key.load(std::memory_order_acquire);
            if (seen == key) return slot.identity.load(std::memory_order_acquire);
            if (seen == kEmpty) return add(launch, key);
        }
    }

    // Before a module or a library goes: others may get the handles of its functions. A library's
    // functions belong to modules, of which the driver does not say whose they are.
    void forget(CUmodule module);
    void forget(CUlibrary library);

private:
    static constexpr size_t kFirstSlots = 1 << 10, kMostSlots = 1 << 17;
    static constexpr uint64_t kEmpty = 0, kGone = 1;  // in the place of a key

    struct Slot {
        std::atomic<uint64_t> key{kEmpty};
        std::atomic<uint64_t> identity{0};
    };
    struct Table {
        std::unique_ptr<Slot[]> slots;
        std::unique_ptr<Named[]> named;  // by slot; for writers
        size_t mask = 0;
        int shift = 0;
        size_t used = 0, gone = 0;  // slots that are not empty; of these, those that may be used again
    };

    // Put together from single words: these were just written, and a wider load would wait until they
    // are in the cache (10 ns).
    static uint64_t key_of(const Launch& launch) {
        auto pair = [](unsigned low, unsigned high) { return uint64_t{high} << 32 | low; };
        uint64_t hash = reinterpret_cast<uint64_t>(launch.function) * 0x9e3779b97f4a7c15ull +
                        pair(launch.grid[0], launch.grid[1]) * 0xc2b2ae3d27d4eb4full +
                        pair(launch.grid[2], launch.block[0]) * 0x165667b19e3779f9ull +
                        pair(launch.block[1], launch.block[2]) * 0xd6e8feb86659fd93ull;
        hash = (hash ^ hash >> 32) * 0x9e3779b97f4a7c15ull;
        return hash > kGone ? hash : hash + 2;
    }

    Table* grow(size_t slots);
    uint64_t add(const Launch& launch, uint64_t key);
    void make_room();
    static size_t find(const Table& table, uint64_t key);
    static void write(Table& table, size_t at, uint64_t key, uint64_t identity, const Named& named);
    template <class Goes>
    void forget_where(Goes&& goes);

    std::mutex lock_;  // who writes
    std::vector<std::unique_ptr<Table>> tables_;
    std::atomic<Table*> table_;
};

}  // namespace eclip
