// Owns: the declaration of the door to the express lane, for bind.cpp.
#pragma once

#include <nanobind/nanobind.h>

void bind_express(nanobind::module_& module);
