#include "identities.h"

#include <cstring>

#include "driver.h"
#include "table.h"

namespace eclip {

Named name_function(CUfunction function) {
    const Driver& real = driver();
    const char* name = nullptr;
    if (function == nullptr) return {};  // the driver will say so itself
    if (real.cuFuncGetName != nullptr && real.cuFuncGetName(&name, function) == CUDA_SUCCESS && name) {
        CUmodule module = nullptr;
        if (real.cuFuncGetModule != nullptr) real.cuFuncGetModule(&module, function);
        return {name, module, true};
    }
    // Launches take kernels as well as functions, by the same argument.
    auto kernel = reinterpret_cast<CUkernel>(function);
    if (real.cuKernelGetName != nullptr && real.cuKernelGetName(&name, kernel) == CUDA_SUCCESS &&
        name) {
        CUlibrary library = nullptr;
        if (real.cuKernelGetLibrary != nullptr) real.cuKernelGetLibrary(&library, kernel);
        return {name, library, false};
    }
    return {};
}

Identities::Table* Identities::grow(size_t slots) {
    auto made = std::make_unique<Table>();
    made->slots = std::make_unique<Slot[]>(slots);
    made->named = std::make_unique<Named[]>(slots);
    made->mask = slots - 1;
    made->shift = 64 - __builtin_ctzll(slots);
    tables_.push_back(std::move(made));
    return tables_.back().get();
}

// The launch's own slot, or the one that it may have.
size_t Identities::find(const Table& table, uint64_t key) {
    size_t gone = ~size_t{0};
    for (size_t at = key >> table.shift;; at = (at + 1) & table.mask) {
        uint64_t seen = table.slots[at].key.load();
        if (seen == key) return at;
        if (seen == kEmpty) return gone <= table.mask ? gone : at;
        if (seen == kGone && gone > table.mask) gone = at;
    }
}

void Identities::write(Table& table, size_t at, uint64_t key, uint64_t identity,
                       const Named& named) {
    Slot& slot = table.slots[at];
    if (slot.key.load() == kGone) --table.gone;
    else ++table.used;
    slot.identity.store(identity, std::memory_order_release);
    slot.key.store(key, std::memory_order_release);
    table.named[at] = {nullptr, named.owner, named.of_module};
}

// Half of the slots stay empty, so that searches are short. Programs whose shapes never repeat would
// fill any table: then all is forgotten.
void Identities::make_room() {
    Table& table = *table_.load();
    size_t slots = table.mask + 1;
    if (2 * (table.used + 1) <= slots) return;
    if (slots == kMostSlots || 4 * (table.used - table.gone) <= slots) {
        for (size_t at = 0; at < slots; ++at) table.slots[at].key.store(kEmpty);
        table.used = table.gone = 0;
        return;
    }
    Table& larger = *grow(2 * slots);
    for (size_t at = 0; at < slots; ++at) {
        uint64_t key = table.slots[at].key.load();
        if (key == kEmpty || key == kGone) continue;
        write(larger, find(larger, key), key, table.slots[at].identity.load(), table.named[at]);
    }
    table_.store(&larger, std::memory_order_release);
}

uint64_t Identities::add(const Launch& launch, uint64_t key) {
    Named named = name_function(launch.function);
    uint64_t made =
        identity(hash_bytes(named.name, strlen(named.name)), launch.grid, launch.block);
    std::lock_guard hold(lock_);
    make_room();
    Table& table = *table_.load();
    size_t at = find(table, key);
    // Unless another thread was faster.
    if (table.slots[at].key.load() != key) write(table, at, key, made, named);
    return made;
}

template <class Goes>
void Identities::forget_where(Goes&& goes) {
    std::lock_guard hold(lock_);
    Table& table = *table_.load();
    for (size_t at = 0; at <= table.mask; ++at) {
        uint64_t key = table.slots[at].key.load();
        if (key == kEmpty || key == kGone || !goes(table.named[at])) continue;
        table.slots[at].key.store(kGone);
        ++table.gone;
    }
}

void Identities::forget(CUmodule module) {
    forget_where([&](const Named& named) {
        return named.owner == nullptr || named.owner == module;
    });
}

void Identities::forget(CUlibrary library) {
    forget_where([&](const Named& named) {
        return named.owner == nullptr || named.owner == library || named.of_module;
    });
}

}  // namespace eclip
