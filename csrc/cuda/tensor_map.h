// The copy engine's view of a matrix, made on the host.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace tandem::cuda {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// [rows, columns] with `pitch` elements from row to row, which are a multiple of 16 bytes.
struct Matrix {
  void* data = nullptr;
  int64_t rows = 0, columns = 0, pitch = 0;
};

// The driver's function, found at run time: the extension links no libcuda, and is imported where there is none.
inline PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static const auto found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result),
        "cuTensorMapEncodeTiled");
    if (result != cudaDriverEntryPointSuccess || function == nullptr) {
      throw std::runtime_error("the driver has no cuTensorMapEncodeTiled");
    }
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  return found;
}

// In boxes of box_rows × 128 bytes, permuted as in copy.cuh; elements of 2 bytes are bf16, of 4 fp32.
inline CUtensorMap tensor_map(const Matrix& matrix, int element_bytes, int box_rows) {
  CUtensorMap map{};
  const cuuint64_t sizes[] = {cuuint64_t(matrix.columns), cuuint64_t(matrix.rows)};
  const cuuint64_t strides[] = {cuuint64_t(matrix.pitch) * element_bytes};
  const cuuint32_t box[] = {cuuint32_t(128 / element_bytes), cuuint32_t(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  const auto type = element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  const CUresult result = encoder()(
      &map, type, 2, matrix.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error(
        "cuTensorMapEncodeTiled refuses a matrix of " + std::to_string(matrix.rows) + " × " +
        std::to_string(matrix.columns) + ", pitch " + std::to_string(matrix.pitch) + ": error " +
        std::to_string(int(result)));
  }
  return map;
}

}  // namespace tandem::cuda
