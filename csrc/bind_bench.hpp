// Owns: the declaration of the door to the gateway bench, for bind.cpp.
#pragma once

#include <nanobind/nanobind.h>

// The two ends of the gateway bench: a stub engine and a load.
void bind_bench(nanobind::module_& module);
