// Owns: the declaration of the second door, for bind.cpp.
#pragma once

#include <nanobind/nanobind.h>

#include <string_view>

// The chained hashes of a prompt, 8 bytes each, little-endian.
nanobind::bytes packed_blocks(std::string_view prompt);

void bind_plain(nanobind::module_& module);
