// Owns: Python's bytes as the core sees them, and the core's text as Python's bytes, for the doors.
#pragma once

#include <nanobind/nanobind.h>

#include <string_view>

// Lives as long as the object.
inline std::string_view view_of(const nanobind::bytes& data) { return {data.c_str(), data.size()}; }

inline nanobind::bytes bytes_of(std::string_view text) { return nanobind::bytes(text.data(), text.size()); }
