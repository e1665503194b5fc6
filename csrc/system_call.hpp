// Owns: what a system call's failure becomes where there is no going on.
#pragma once

#include <cerrno>
#include <system_error>

namespace laya {

// The result of a call that gives a negative number and errno where it fails. Throws std::system_error.
inline int checked(int result, const char* what) {
    if (result < 0) {
        throw std::system_error(errno, std::generic_category(), what);
    }
    return result;
}

}  // namespace laya
