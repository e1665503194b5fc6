// Owns: the declaration of the second door, for bind.cpp.
#pragma once

#include <nanobind/nanobind.h>

void bind_plain(nanobind::module_& module);
