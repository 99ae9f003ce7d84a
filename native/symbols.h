// Where an object has a function, by its own table of symbols. dlsym would wait for whoever loads a
// library, and stands behind a hook of ours.
#pragma once

#include <elf.h>
#include <link.h>

#include <cstring>

namespace eclip {

// What is needed of an object's dynamic section.
struct Symbols {
    uintptr_t base = 0;
    const ElfW(Sym)* table = nullptr;
    const char* strings = nullptr;
    const uint32_t* hashes = nullptr;
    uintptr_t soname = 0;

    Symbols() = default;
    Symbols(uintptr_t at, const ElfW(Dyn)* dynamic) : base(at) {
        for (const ElfW(Dyn)* entry = dynamic; entry->d_tag != DT_NULL; ++entry) {
            auto value = entry->d_un.d_ptr;
            auto place = reinterpret_cast<const void*>(value < base ? value + base : value);
            if (entry->d_tag == DT_SYMTAB) table = static_cast<const ElfW(Sym)*>(place);
            if (entry->d_tag == DT_STRTAB) strings = static_cast<const char*>(place);
            if (entry->d_tag == DT_GNU_HASH) hashes = static_cast<const uint32_t*>(place);
            if (entry->d_tag == DT_SONAME) soname = value;
        }
    }

    bool usable() const { return table != nullptr && strings != nullptr && hashes != nullptr; }
    const char* name() const { return usable() && soname != 0 ? strings + soname : ""; }

    void* find(const char* wanted) const {
        if (!usable()) return nullptr;
        uint32_t hash = 5381;
        for (const char* letter = wanted; *letter != '\0'; ++letter)
            hash = hash * 33 + static_cast<unsigned char>(*letter);
        const uint32_t bucket_count = hashes[0], first = hashes[1], words = hashes[2];
        const uint32_t* buckets = hashes + 4 + words * sizeof(ElfW(Addr)) / sizeof(uint32_t);
        const uint32_t* chain = buckets + bucket_count;
        for (uint32_t index = buckets[hash % bucket_count]; index >= first; ++index) {
            const uint32_t link = chain[index - first];
            const ElfW(Sym)& symbol = table[index];
            if ((link | 1) == (hash | 1) && strcmp(strings + symbol.st_name, wanted) == 0)
                return reinterpret_cast<void*>(base + symbol.st_value);
            if (link & 1) break;
        }
        return nullptr;
    }
};

// The first object, in the order in which they were loaded, for which `is_wanted` is true; else none.
template <class Wanted>
Symbols find_object(Wanted&& is_wanted) {
    struct Search {
        Wanted& is_wanted;
        Symbols found;
    } search{is_wanted, {}};
    auto look = [](dl_phdr_info* object, size_t, void* data) {
        auto search = static_cast<Search*>(data);
        for (int index = 0; index < object->dlpi_phnum; ++index) {
            const ElfW(Phdr)& part = object->dlpi_phdr[index];
            if (part.p_type != PT_DYNAMIC) continue;
            auto dynamic = object->dlpi_addr + part.p_vaddr;
            Symbols symbols(object->dlpi_addr, reinterpret_cast<const ElfW(Dyn)*>(dynamic));
            if (!symbols.usable() || !search->is_wanted(symbols)) continue;
            search->found = symbols;
            return 1;
        }
        return 0;
    };
    dl_iterate_phdr(look, &search);
    return search.found;
}

}  // namespace eclip
