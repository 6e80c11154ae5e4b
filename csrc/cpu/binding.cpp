#include <torch/csrc/utils/pybind.h>

#include "kernels.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  const py::call_guard<py::gil_scoped_release> released;
  module.attr("ROW_MULTIPLE") = tandem::kRowMultiple;
  module.def("scan", &tandem::scan, released);
  module.def("compact", &tandem::compact, released);
  module.def("reshape", &tandem::reshape, released);
  module.def("transposed_product", &tandem::transposed_product, released);
  module.def("add_product", &tandem::add_product, released);
  module.def("gae", &tandem::gae, released);
}
