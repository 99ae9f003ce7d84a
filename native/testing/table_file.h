// Tables as libeclip reads them, written by the programs that are run under it.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "../table.h"

namespace testing {

// What follows the header, piece by piece; the header comes when it is saved.
class TableFile {
public:
    template <class T>
    void put(T value) {
        append(body_, value);
    }

    void save(const std::string& path) const {
        std::vector<unsigned char> out;
        for (char letter : {'E', 'C', 'L', 'I', 'P', 'T', 'B', 'L'}) append(out, letter);
        append(out, eclip::kTableVersion);
        append(out, static_cast<uint32_t>(body_.size() + 24));
        append(out, eclip::hash_bytes(body_.data(), body_.size()));
        out.insert(out.end(), body_.begin(), body_.end());
        FILE* file = fopen(path.c_str(), "wb");
        if (file == nullptr || fwrite(out.data(), 1, out.size(), file) != out.size()) abort();
        fclose(file);
    }

private:
    template <class T>
    static void append(std::vector<unsigned char>& out, T value) {
        auto bytes = reinterpret_cast<unsigned char*>(&value);
        out.insert(out.end(), bytes, bytes + sizeof value);
    }
    std::vector<unsigned char> body_;
};

}  // namespace testing
