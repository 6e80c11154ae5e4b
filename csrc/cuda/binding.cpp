// Python's way to the kernels: by name, with addresses as integers, on the caller's stream. Python sees to shapes.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>

#include "registry.h"

namespace py = pybind11;
using namespace tandem::cuda;

namespace {

// (address, rows, columns, elements from row to row)
using PyMatrix = std::tuple<uintptr_t, int64_t, int64_t, int64_t>;

Matrix matrix(const PyMatrix& from) {
  const auto& [data, rows, columns, pitch] = from;
  return {reinterpret_cast<void*>(data), rows, columns, pitch};
}

const Variant& find(const std::string& name) {
  const auto found = variants().find(name);
  if (found == variants().end()) throw std::invalid_argument("no CUDA kernel " + name + " was built");
  return found->second;
}

void launch(
    const std::string& name, const PyMatrix& a, const PyMatrix& b, const PyMatrix& out, int rows, int columns,
    int depth, int band, int programs, uintptr_t inverse_temperature, uintptr_t anchor, uintptr_t target, uintptr_t factor,
    uintptr_t total, uintptr_t weighted, uintptr_t stream) {
  Request request;
  request.a = matrix(a);
  request.b = matrix(b);
  request.out = matrix(out);
  request.rows = rows;
  request.columns = columns;
  request.depth = depth;
  request.band = band;
  request.programs = programs;
  request.inverse_temperature = reinterpret_cast<const float*>(inverse_temperature);
  request.anchor = reinterpret_cast<const float*>(anchor);
  request.target = reinterpret_cast<const int*>(target);
  request.factor = reinterpret_cast<const float*>(factor);
  request.total = reinterpret_cast<float*>(total);
  request.weighted = reinterpret_cast<float*>(weighted);
  request.stream = reinterpret_cast<cudaStream_t>(stream);
  find(name).launch(request);
}

py::dict describe(const std::string& name) {
  const Variant& variant = find(name);
  py::dict result;
  result["tile_rows"] = variant.tile_rows;
  result["tile_columns"] = variant.tile_columns;
  result["warps"] = variant.warps;
  result["shared_bytes"] = variant.shared_bytes;
  return result;
}

py::list names() {
  py::list result;
  for (const auto& entry : variants()) result.append(entry.first);
  return result;
}

}  // namespace

PYBIND11_MODULE(_cuda, module) {
  const PyMatrix nothing{0, 0, 0, 0};
  module.def(
      "launch", &launch, py::arg("name"), py::arg("a"), py::arg("b"), py::arg("out") = nothing, py::kw_only(),
      py::arg("rows"), py::arg("columns"), py::arg("depth"), py::arg("band"), py::arg("programs"),
      py::arg("inverse_temperature") = 0, py::arg("anchor") = 0, py::arg("target") = 0, py::arg("factor") = 0,
      py::arg("total") = 0, py::arg("weighted") = 0, py::arg("stream") = 0);
  module.def("describe", &describe, "Its tile's rows and columns, the warps that multiply it, its shared memory");
  module.def("names", &names);
}
