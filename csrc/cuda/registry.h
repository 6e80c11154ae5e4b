// The variants that were compiled into the extension, each in a file of its own, by name.
#pragma once

#include <cuda_runtime.h>

#include <map>
#include <string>

#include "tensor_map.h"

namespace tandem::cuda {

// C [rows, columns] = A · B over `depth`, and what an epilogue may ask for. Vectors are fp32 [rows] unless said.
struct Request {
  Matrix a, b, out;
  int rows = 0, columns = 0, depth = 0;
  int band = 16;      // rows of tiles (of a cluster) that go down a column together
  int programs = 0;   // blocks
  const float* inverse_temperature = nullptr;
  const float* anchor = nullptr;
  const int* target = nullptr;  // int32
  const float* factor = nullptr;
  float* total = nullptr;     // [tiles across, rows]; the main loop's sums [tiles down, tiles across, warps]
  float* weighted = nullptr;  // [tiles across, rows]
  cudaStream_t stream = nullptr;
};

struct Variant {
  void (*launch)(const Request&);
  int tile_rows, tile_columns, warps, shared_bytes;
};

inline std::map<std::string, Variant>& variants() {
  static std::map<std::string, Variant> all;
  return all;
}

}  // namespace tandem::cuda
