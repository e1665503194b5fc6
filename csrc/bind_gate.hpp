#pragma once

#include <nanobind/nanobind.h>

void bind_gate(nanobind::module_& module);
