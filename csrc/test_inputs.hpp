// Owns: what the native tests share: a failed line ends the program, and inputs are nearly right, each in memory of its
// own size, so that a read past its end is a fault that a sanitizer sees.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <string_view>

inline void require(bool holds, const char* what) {
    if (!holds) {
        std::fprintf(stderr, "failed: %s\n", what);
        std::exit(1);
    }
}

inline std::string mutated(std::string text, std::mt19937& dice) {
    for (int times = static_cast<int>(dice() % 4); times > 0 && !text.empty(); --times) {
        const std::size_t at = dice() % text.size();
        switch (dice() % 5) {
            case 0: text[at] = static_cast<char>(dice()); break;
            case 1: text.erase(at, dice() % 9); break;
            case 2: text.insert(at, text.substr(dice() % text.size(), dice() % 9)); break;
            case 3: text.resize(at); break;
            default: text[at] = "\"\\{}[],:0123456789 \r\n"[dice() % 21]; break;
        }
    }
    return text;
}

// A copy that ends where the text does.
struct Exact {
    explicit Exact(const std::string& text) : data(new char[text.size()]), size(text.size()) {
        text.copy(data.get(), size);
    }
    std::string_view view() const { return {data.get(), size}; }
    std::unique_ptr<char[]> data;
    std::size_t size;
};

inline bool lies_within(std::string_view part, std::string_view whole) {
    return part.empty() || (part.data() >= whole.data() && part.data() + part.size() <= whole.data() + whole.size());
}
