#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "neo_desktop/cpu.h"

namespace py = pybind11;

PYBIND11_MODULE(_native, m) {
  m.def("cpu_features", &neo_desktop::cpu_features);
  m.def("default_num_threads", &neo_desktop::default_num_threads);
}
