#include <torch/csrc/utils/pybind.h>

#include "kernels.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  const py::call_guard<py::gil_scoped_release> released;
  module.def("statistics", &tandem::statistics, released);
  module.def("dlogits", &tandem::dlogits, released);
  module.def("linear_logits", &tandem::linear_logits, released);
  module.def("has_linear_logits", &tandem::has_linear_logits, released);
  module.def("gae", &tandem::gae, released);
}
