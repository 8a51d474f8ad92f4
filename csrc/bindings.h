// The parts of the Python module, each bound in a file of its own.
#pragma once

#include <pybind11/pybind11.h>

namespace vramx::bindings {

void bind_replay(pybind11::module_& module);
void bind_device(pybind11::module_& module);
void bind_process(pybind11::module_& module);
void bind_looks(pybind11::module_& module);

}  // namespace vramx::bindings
