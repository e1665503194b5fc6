// Owns: the declaration of the second door, for bind.cpp.
#pragma once

#include <nanobind/nanobind.h>

#include <string_view>

#include "plain_lane.hpp"

// The chained hashes of a prompt, 8 bytes each, little-endian.
nanobind::bytes packed_blocks(std::string_view prompt);

// The lane with the table it routes by, which must live as long.
struct HeldLane {
    nanobind::object table;
    laya::PlainLane lane;
};

void bind_plain(nanobind::module_& module);
