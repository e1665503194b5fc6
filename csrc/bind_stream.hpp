// Owns: the declaration of the door to streams, for bind.cpp.
#pragma once

#include <nanobind/nanobind.h>

void bind_stream(nanobind::module_& module);
