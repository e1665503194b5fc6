// Owns: the clock that Python's time.monotonic() reads.
#pragma once

#include <chrono>

namespace laya {

inline double monotonic_s() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace laya
